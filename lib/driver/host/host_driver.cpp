// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/async_pool.hpp"
#include "lib/driver/host/memory_table.hpp"
#include "lib/driver/host/options.hpp"
#include "lib/driver/host/pages.hpp"
#include "lib/driver/host/pinned_table.hpp"
#include "lib/driver/host/stream_table.hpp"
#include "lib/support/fork_guard.hpp"
#include "lib/support/format.hpp"
#include "lib/support/patience.hpp"

#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/version.hpp>

#include <fmt/format.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <utility>
#include <vector>

#include <unistd.h>

namespace evmm {

namespace {

using host::async_pool;
using host::memory_table;
using host::pinned_table;
using host::stream_table;

/// When work is enqueued, as CUDA looks addresses up then; and again when it runs, since a range
/// that was unmapped meanwhile is a fault there.
template <class Error>
void check_touch(const memory_table& memory, address at, std::size_t bytes, access_kind need) {
  if (at == 0) throw invalid_argument("the address is null");
  if (auto why = memory.why_untouchable(at, bytes, need)) {
    throw Error(std::move(*why), "map the range and set access first, and unmap it after its use",
                EFAULT);
  }
}

/// Of all host drivers of the process, as CUDA's is.
std::optional<device_id>& this_threads_device() {
  thread_local std::optional<device_id> current;
  return current;
}

/// Puts the tables together and keeps out calls that CUDA would not survive.
class host_driver_impl final : public host_driver {
 public:
  explicit host_driver_impl(const host_driver_options& options)
      : options_(host::checked(options)),
        memory_(std::make_shared<memory_table>(options_)),
        pinned_(std::make_unique<pinned_table>(*memory_, nodes())),
        streams_(std::make_unique<stream_table>()) {
    for (int i = 0; i < options_.devices; ++i) {
      pools_.push_back(std::make_unique<async_pool>(*memory_, device_id{i}));
    }
    host::raise_descriptor_limit();
  }

  ~host_driver_impl() override {
    if (!process_.forked()) return;
    // In a forked child the threads of the streams are not there to be joined, and any lock may be
    // held for good: leave all to the end of the process.
    static_cast<void>(streams_.release());
    static_cast<void>(pinned_.release());
    for (auto& pool : pools_) static_cast<void>(pool.release());
    static_cast<void>(new std::shared_ptr<memory_table>(std::move(memory_)));
  }

  driver_info info() const override {
    check_caller();
    return {.kind = driver_kind::host,
            .name = "host",
            .version = EVMM_VERSION,
            .fd_sharing = true,
            .fabric_sharing = options_.fabric};
  }

  int device_count() const override {
    check_caller();
    return options_.devices;
  }

  device_description describe(device_id device) const override {
    check(device);
    device_description found{.id = device,
                             .name = fmt::format("host device {}", device.value),
                             .pci_bus_id = {},
                             .total_bytes = options_.device_bytes,
                             .host_node = std::nullopt,
                             .host_memory = !options_.numa_nodes.empty()};
    if (found.host_memory) {
      // Devices are spread over the nodes as slots are over sockets.
      const auto index = static_cast<std::size_t>(device.value) * options_.numa_nodes.size() /
                         static_cast<std::size_t>(options_.devices);
      found.host_node = numa_node{options_.numa_nodes[index]};
    }
    return found;
  }

  memory_usage usage(memory_location where) const override {
    check_caller();
    return memory_->usage(where);
  }

  /// Itself: no other process is known to hold memory of a device that is pretended.
  std::vector<process_usage> processes(device_id device) const override {
    check(device);
    const auto used = memory_->usage(memory_location::on(device));
    return {{.pid = ::getpid(), .bytes = used.total_bytes - used.free_bytes, .this_process = true}};
  }

  bool can_access(device_id from, device_id to) const override {
    check(from);
    check(to);
    return true;
  }

  /// "Kernels" are host functions.
  bool kernels_reach(address at) const override { return at != 0; }

  std::optional<device_id> current_device() const override {
    check_caller();
    return this_threads_device();
  }

  void set_current_device(std::optional<device_id> device) override {
    if (device) check(*device);
    this_threads_device() = device;
  }

  std::vector<numa_node> numa_nodes() const override {
    check_caller();
    return nodes();
  }

  std::size_t granularity(memory_location where) const override {
    check_caller();
    memory_->check_location(where);
    return host::k_granularity;
  }

  address reserve(std::size_t bytes, std::size_t alignment, address hint) override {
    check_caller();
    return memory_->reserve(bytes, alignment, hint);
  }
  void free(address base, std::size_t bytes) override {
    check_caller();
    memory_->free(base, bytes);
  }
  allocation_handle create(const allocation_request& request) override {
    check_caller();
    return memory_->create(request);
  }
  void release(allocation_handle handle) override {
    check_caller();
    memory_->release(handle);
  }
  void map(address at, std::size_t bytes, allocation_handle handle) override {
    check_caller();
    memory_->map(at, bytes, handle);
  }
  void unmap(address at, std::size_t bytes) override {
    check_caller();
    memory_->unmap(at, bytes);
  }
  void set_access(address at, std::size_t bytes, std::span<const access_grant> grants) override {
    check_caller();
    memory_->set_access(at, bytes, grants);
  }
  unique_fd export_fd(allocation_handle handle) override {
    check_caller();
    return memory_->export_fd(handle);
  }
  allocation_handle import_fd(int fd, const allocation_request& request) override {
    check_caller();
    return memory_->import_fd(fd, request);
  }
  fabric_handle export_fabric(allocation_handle handle) override {
    check_caller();
    return memory_->export_fabric(handle);
  }
  allocation_handle import_fabric(const fabric_handle& shared,
                                  const allocation_request& request) override {
    check_caller();
    return memory_->import_fabric(shared, request);
  }

  address allocate_pinned(std::size_t bytes) override {
    check_caller();
    return pinned_->allocate(bytes);
  }
  void free_pinned(address at) override {
    check_caller();
    pinned_->free(at);
  }
  void pin(address at, std::size_t bytes) override {
    check_caller();
    pinned_->pin(at, bytes);
  }
  void unpin(address at) override {
    check_caller();
    pinned_->unpin(at);
  }

  native_stream create_stream(device_id device) override {
    check(device);
    return streams_->create_stream(device);
  }
  void destroy_stream(native_stream stream) override {
    check_caller();
    streams_->destroy_stream(stream);
  }
  void synchronize(native_stream stream) override {
    check_caller();
    streams_->synchronize(stream);
  }
  bool idle(native_stream stream) override {
    check_caller();
    return streams_->idle(stream);
  }
  native_event create_event(device_id device) override {
    check(device);
    return streams_->create_event(device);
  }
  void destroy_event(native_event event) override {
    check_caller();
    streams_->destroy_event(event);
  }
  void record(native_event event, native_stream stream) override {
    check_caller();
    streams_->record(event, stream);
  }
  bool done(native_event event) override {
    check_caller();
    return streams_->done(event);
  }
  void synchronize(native_event event) override {
    check_caller();
    streams_->synchronize(event);
  }
  void wait(native_stream stream, native_event event) override {
    check_caller();
    streams_->wait(stream, event);
  }

  address allocate_async(device_id device, std::size_t bytes, native_stream stream) override {
    check(device);
    streams_->check_not_captured(stream, "cannot allocate in stream order");
    return pool(device).allocate(bytes, stream);
  }
  void free_async(address at, native_stream stream) override {
    check_caller();
    const auto mark = [&] { return streams_->mark(stream, "cannot free in stream order"); };
    for (const auto& each : pools_) {
      if (each->free(at, stream, mark)) return;
    }
    throw invalid_argument(
        fmt::format("cannot free {} in stream order: nothing was allocated there, or it was freed",
                    format_address(at)),
        "pass what allocate_async gave, once");
  }
  void trim_async(device_id device, std::size_t keep_bytes) override {
    check(device);
    pool(device).trim(keep_bytes);
  }
  async_memory async_usage(device_id device) const override {
    check(device);
    return pool(device).usage();
  }

  void copy(address to, address from, std::size_t bytes, native_stream stream) override {
    check_caller();
    if (bytes == 0) return;
    check_touch<invalid_argument>(*memory_, from, bytes, access_kind::read);
    check_touch<invalid_argument>(*memory_, to, bytes, access_kind::read_write);
    streams_->enqueue(stream, [memory = memory_, to, from, bytes] {
      check_touch<driver_error>(*memory, from, bytes, access_kind::read);
      check_touch<driver_error>(*memory, to, bytes, access_kind::read_write);
      std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
    });
  }
  void fill(address at, std::byte value, std::size_t bytes, native_stream stream) override {
    check_caller();
    if (bytes == 0) return;
    check_touch<invalid_argument>(*memory_, at, bytes, access_kind::read_write);
    streams_->enqueue(stream, [memory = memory_, at, value, bytes] {
      check_touch<driver_error>(*memory, at, bytes, access_kind::read_write);
      std::memset(reinterpret_cast<void*>(at), std::to_integer<int>(value), bytes);
    });
  }
  void store_word(address at, std::uint64_t value, native_stream stream) override {
    check_caller();
    check_word(at, access_kind::read_write);
    streams_->enqueue(stream, [memory = memory_, at, value] {
      check_touch<driver_error>(*memory, at, sizeof value, access_kind::read_write);
      __atomic_store_n(reinterpret_cast<std::uint64_t*>(at), value, __ATOMIC_RELEASE);
    });
  }
  void wait_word(address at, std::uint64_t least, native_stream stream) override {
    check_caller();
    check_word(at, access_kind::read);
    streams_->enqueue(stream, [memory = memory_, at, least] {
      check_touch<driver_error>(*memory, at, sizeof least, access_kind::read);
      const auto* const word = reinterpret_cast<const std::uint64_t*>(at);
      const auto ahead = [&] {
        return static_cast<std::int64_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - least);
      };
      for (patience wait; ahead() < 0;) wait.spend();
    });
  }
  void launch(native_stream stream, std::function<void()> function) override {
    check_caller();
    if (!function) throw invalid_argument("an empty function cannot be launched");
    streams_->enqueue(stream, std::move(function));
  }
  capture_info capture(native_stream stream) const override {
    check_caller();
    return streams_->capture(stream);
  }
  std::vector<graph_node> capture_frontier(native_stream stream) const override {
    check_caller();
    return streams_->capture_frontier(stream);
  }
  std::vector<graph_node> graph_dependencies(graph_node node) const override {
    check_caller();
    return streams_->graph_dependencies(node);
  }

  void begin_capture(native_stream stream) override {
    check_caller();
    streams_->begin_capture(stream);
  }
  std::shared_ptr<const host_graph> end_capture(native_stream stream) override {
    check_caller();
    return streams_->end_capture(stream);
  }
  void launch_graph(const std::shared_ptr<const host_graph>& graph, native_stream stream) override {
    check_caller();
    if (!graph) throw invalid_argument("there is no graph to launch");
    streams_->enqueue(stream, [graph] { graph->run(); });
  }

 private:
  void check_caller() const {
    process_.check();
    if (host::on_worker_thread()) {
      throw invalid_argument("a function launched on a stream called the driver",
                             "call it from the thread that launches");
    }
  }
  void check_word(address at, access_kind need) const {
    if (at % sizeof(std::uint64_t) != 0) {
      throw invalid_argument(fmt::format("the word at {} is not aligned to 8", format_address(at)));
    }
    check_touch<invalid_argument>(*memory_, at, sizeof(std::uint64_t), need);
  }
  void check(device_id device) const {
    check_caller();
    memory_->check_location(memory_location::on(device));
  }
  std::vector<numa_node> nodes() const {
    std::vector<numa_node> found;
    for (const int node : options_.numa_nodes) found.push_back(numa_node{node});
    return found;
  }
  async_pool& pool(device_id device) const {
    return *pools_[static_cast<std::size_t>(device.value)];
  }

  const host_driver_options options_;
  const fork_guard process_;
  std::shared_ptr<memory_table> memory_;  ///< shared with the copies that are under way
  std::unique_ptr<pinned_table> pinned_;
  std::vector<std::unique_ptr<async_pool>> pools_;  ///< by device
  std::unique_ptr<stream_table> streams_;           ///< goes first: its work may use all others
};

}  // namespace

std::shared_ptr<host_driver> host_driver::make(const host_driver_options& options) {
  return std::make_shared<host_driver_impl>(options);
}

}  // namespace evmm
