// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"

#include <fmt/format.h>

#include <chrono>
#include <filesystem>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>
#include <type_traits>
#include <utility>

namespace evmm::test {

const char* to_string(driver_call call) {
  switch (call) {
    case driver_call::usage:
      return "usage";
    case driver_call::reserve:
      return "reserve";
    case driver_call::free:
      return "free";
    case driver_call::create:
      return "create";
    case driver_call::release:
      return "release";
    case driver_call::map:
      return "map";
    case driver_call::unmap:
      return "unmap";
    case driver_call::set_access:
      return "set_access";
    case driver_call::export_fd:
      return "export_fd";
    case driver_call::import_fd:
      return "import_fd";
    case driver_call::export_fabric:
      return "export_fabric";
    case driver_call::import_fabric:
      return "import_fabric";
    case driver_call::allocate_pinned:
      return "allocate_pinned";
    case driver_call::free_pinned:
      return "free_pinned";
    case driver_call::pin:
      return "pin";
    case driver_call::unpin:
      return "unpin";
    case driver_call::create_stream:
      return "create_stream";
    case driver_call::destroy_stream:
      return "destroy_stream";
    case driver_call::synchronize_stream:
      return "synchronize_stream";
    case driver_call::create_event:
      return "create_event";
    case driver_call::destroy_event:
      return "destroy_event";
    case driver_call::record:
      return "record";
    case driver_call::done:
      return "done";
    case driver_call::synchronize_event:
      return "synchronize_event";
    case driver_call::wait:
      return "wait";
    case driver_call::allocate_async:
      return "allocate_async";
    case driver_call::free_async:
      return "free_async";
    case driver_call::trim_async:
      return "trim_async";
    case driver_call::copy:
      return "copy";
    case driver_call::fill:
      return "fill";
    case driver_call::store_word:
      return "store_word";
    case driver_call::wait_word:
      return "wait_word";
    case driver_call::launch:
      return "launch";
  }
  return "unknown";
}

std::string to_string(const alive_counts& counts) {
  return fmt::format(
      "{} ranges ({} B), {} handles ({} B), {} mappings ({} B), {} pinned ({} B), {} async ({} B), "
      "{} streams, {} events, {} descriptors",
      counts.ranges, counts.reserved_bytes, counts.handles, counts.created_bytes, counts.mappings,
      counts.mapped_bytes, counts.pinned, counts.pinned_bytes, counts.async_blocks,
      counts.async_bytes, counts.streams, counts.events, counts.descriptors);
}

std::ostream& operator<<(std::ostream& out, const alive_counts& counts) {
  return out << to_string(counts);
}

namespace {

bool fails_routinely(driver_call call) {
  switch (call) {
    case driver_call::free:
    case driver_call::release:
    case driver_call::unmap:
    case driver_call::free_pinned:
    case driver_call::unpin:
    case driver_call::free_async:
    case driver_call::trim_async:
    case driver_call::destroy_stream:
    case driver_call::destroy_event:
    case driver_call::synchronize_stream:
    case driver_call::synchronize_event:
    case driver_call::done:
      return false;
    default:
      return true;
  }
}

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all))) - 1;  // but for our own
}

template <class Table>
std::size_t total(const Table& sizes) {
  std::size_t sum = 0;
  for (const auto& [name, bytes] : sizes) sum += bytes;
  return sum;
}

class fault_driver_impl final : public fault_driver {
 public:
  explicit fault_driver_impl(std::shared_ptr<driver> inner) : inner_(std::move(inner)) {}

  void fail_call(std::size_t nth, error_category category) override {
    arm({std::nullopt, nth, category});
  }
  void fail_call(driver_call kind, std::size_t nth, error_category category) override {
    arm({kind, nth, category});
  }
  bool disarm() override {
    const std::lock_guard lock(mutex_);
    armed_.reset();
    return std::exchange(happened_, false);
  }

  alive_counts alive() const override {
    const std::lock_guard lock(mutex_);
    return {.ranges = ranges_.size(),
            .handles = handles_.size(),
            .mappings = mappings_.size(),
            .streams = streams_.size(),
            .events = events_.size(),
            .pinned = pinned_.size(),
            .async_blocks = async_.size(),
            .pinned_bytes = total(pinned_),
            .async_bytes = total(async_),
            .reserved_bytes = total(ranges_),
            .created_bytes = total(handles_),
            .mapped_bytes = total(mappings_),
            .descriptors = open_descriptors()};
  }
  std::vector<driver_call> record_of_calls() const override {
    const std::lock_guard lock(mutex_);
    return calls_;
  }
  void clear_record() override {
    const std::lock_guard lock(mutex_);
    calls_.clear();
    time_in_calls_ = {};
  }
  std::chrono::nanoseconds time_in_calls() const override {
    const std::lock_guard lock(mutex_);
    return time_in_calls_;
  }

  driver& inner() override { return *inner_; }

  driver_info info() const override { return inner_->info(); }
  int device_count() const override { return inner_->device_count(); }
  device_description describe(device_id device) const override { return inner_->describe(device); }
  memory_usage usage(memory_location where) const override {
    return call(driver_call::usage, [&] { return inner_->usage(where); });
  }
  std::vector<process_usage> processes(device_id device) const override {
    return inner_->processes(device);
  }
  bool can_access(device_id from, device_id to) const override {
    return inner_->can_access(from, to);
  }
  bool kernels_reach(address at) const override { return inner_->kernels_reach(at); }
  std::optional<device_id> current_device() const override { return inner_->current_device(); }
  void set_current_device(std::optional<device_id> device) override {
    inner_->set_current_device(device);
  }
  std::vector<numa_node> numa_nodes() const override { return inner_->numa_nodes(); }
  std::size_t granularity(memory_location where) const override {
    return inner_->granularity(where);
  }

  address reserve(std::size_t bytes, std::size_t alignment, address hint) override {
    return call(driver_call::reserve, [&] {
      const address base = inner_->reserve(bytes, alignment, hint);
      add(ranges_, base, bytes);
      return base;
    });
  }
  void free(address base, std::size_t bytes) override {
    call(driver_call::free, [&] { remove(ranges_, base, [&] { inner_->free(base, bytes); }); });
  }
  allocation_handle create(const allocation_request& request) override {
    return call(driver_call::create,
                [&] { return add(handles_, inner_->create(request), request.bytes); });
  }
  void release(allocation_handle handle) override {
    call(driver_call::release, [&] { remove(handles_, handle, [&] { inner_->release(handle); }); });
  }
  void map(address at, std::size_t bytes, allocation_handle handle) override {
    call(driver_call::map, [&] {
      inner_->map(at, bytes, handle);
      add(mappings_, at, bytes);
    });
  }
  void unmap(address at, std::size_t bytes) override {
    call(driver_call::unmap, [&] { remove(mappings_, at, [&] { inner_->unmap(at, bytes); }); });
  }
  void set_access(address at, std::size_t bytes, std::span<const access_grant> grants) override {
    call(driver_call::set_access, [&] { inner_->set_access(at, bytes, grants); });
  }
  unique_fd export_fd(allocation_handle handle) override {
    return call(driver_call::export_fd, [&] { return inner_->export_fd(handle); });
  }
  allocation_handle import_fd(int fd, const allocation_request& request) override {
    return call(driver_call::import_fd,
                [&] { return add(handles_, inner_->import_fd(fd, request), request.bytes); });
  }
  fabric_handle export_fabric(allocation_handle handle) override {
    return call(driver_call::export_fabric, [&] { return inner_->export_fabric(handle); });
  }
  allocation_handle import_fabric(const fabric_handle& shared,
                                  const allocation_request& request) override {
    return call(driver_call::import_fabric, [&] {
      return add(handles_, inner_->import_fabric(shared, request), request.bytes);
    });
  }
  address allocate_pinned(std::size_t bytes) override {
    return call(driver_call::allocate_pinned,
                [&] { return add(pinned_, inner_->allocate_pinned(bytes), bytes); });
  }
  void free_pinned(address at) override {
    call(driver_call::free_pinned, [&] { remove(pinned_, at, [&] { inner_->free_pinned(at); }); });
  }
  void pin(address at, std::size_t bytes) override {
    call(driver_call::pin, [&] {
      inner_->pin(at, bytes);
      add(pinned_, at, bytes);
    });
  }
  void unpin(address at) override {
    call(driver_call::unpin, [&] { remove(pinned_, at, [&] { inner_->unpin(at); }); });
  }

  native_stream create_stream(device_id device) override {
    return call(driver_call::create_stream,
                [&] { return add(streams_, inner_->create_stream(device), 1); });
  }
  void destroy_stream(native_stream stream) override {
    call(driver_call::destroy_stream,
         [&] { remove(streams_, stream, [&] { inner_->destroy_stream(stream); }); });
  }
  void synchronize(native_stream stream) override {
    call(driver_call::synchronize_stream, [&] { inner_->synchronize(stream); });
  }
  bool idle(native_stream stream) override { return inner_->idle(stream); }
  native_event create_event(device_id device) override {
    return call(driver_call::create_event,
                [&] { return add(events_, inner_->create_event(device), 1); });
  }
  void destroy_event(native_event event) override {
    call(driver_call::destroy_event,
         [&] { remove(events_, event, [&] { inner_->destroy_event(event); }); });
  }
  void record(native_event event, native_stream stream) override {
    call(driver_call::record, [&] { inner_->record(event, stream); });
  }
  bool done(native_event event) override {
    return call(driver_call::done, [&] { return inner_->done(event); });
  }
  void synchronize(native_event event) override {
    call(driver_call::synchronize_event, [&] { inner_->synchronize(event); });
  }
  void wait(native_stream stream, native_event event) override {
    call(driver_call::wait, [&] { inner_->wait(stream, event); });
  }
  address allocate_async(device_id device, std::size_t bytes, native_stream stream) override {
    return call(driver_call::allocate_async,
                [&] { return add(async_, inner_->allocate_async(device, bytes, stream), bytes); });
  }
  void free_async(address at, native_stream stream) override {
    call(driver_call::free_async,
         [&] { remove(async_, at, [&] { inner_->free_async(at, stream); }); });
  }
  void trim_async(device_id device, std::size_t keep_bytes) override {
    call(driver_call::trim_async, [&] { inner_->trim_async(device, keep_bytes); });
  }
  async_memory async_usage(device_id device) const override { return inner_->async_usage(device); }
  void copy(address to, address from, std::size_t bytes, native_stream stream) override {
    call(driver_call::copy, [&] { inner_->copy(to, from, bytes, stream); });
  }
  void fill(address at, std::byte value, std::size_t bytes, native_stream stream) override {
    call(driver_call::fill, [&] { inner_->fill(at, value, bytes, stream); });
  }
  void store_word(address at, std::uint64_t value, native_stream stream) override {
    call(driver_call::store_word, [&] { inner_->store_word(at, value, stream); });
  }
  void wait_word(address at, std::uint64_t least, native_stream stream) override {
    call(driver_call::wait_word, [&] { inner_->wait_word(at, least, stream); });
  }
  void launch(native_stream stream, std::function<void()> function) override {
    call(driver_call::launch, [&] { inner_->launch(stream, std::move(function)); });
  }
  capture_info capture(native_stream stream) const override { return inner_->capture(stream); }
  std::vector<graph_node> capture_frontier(native_stream stream) const override {
    return inner_->capture_frontier(stream);
  }
  std::vector<graph_node> graph_dependencies(graph_node node) const override {
    return inner_->graph_dependencies(node);
  }

 private:
  struct fault {
    std::optional<driver_call> kind;  ///< nullopt: any that fails routinely
    std::size_t calls_before = 0;
    error_category category{};
  };

  void arm(fault next) {
    const std::lock_guard lock(mutex_);
    armed_ = next;
    happened_ = false;
  }

  void fail_if_armed(driver_call kind) const {
    const std::lock_guard lock(mutex_);
    if (!armed_ || (armed_->kind ? *armed_->kind != kind : !fails_routinely(kind))) return;
    if (armed_->calls_before-- > 0) return;
    const auto category = armed_->category;
    armed_.reset();
    happened_ = true;
    throw_error(category,
                {.message = fmt::format("{} fails because a test said so", to_string(kind))});
  }

  /// Writes the call down when it ends, however it ends.
  template <class Step>
  std::invoke_result_t<Step> call(driver_call kind, Step&& step) const {
    struct written {
      const fault_driver_impl& self;
      driver_call kind;
      std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
      ~written() {
        const auto spent = std::chrono::steady_clock::now() - begin;
        const std::lock_guard lock(self.mutex_);
        self.calls_.push_back(kind);
        self.time_in_calls_ += spent;
      }
    } const at_end{*this, kind};
    fail_if_armed(kind);
    return step();
  }

  template <class Key>
  Key add(std::map<Key, std::size_t>& table, Key name, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    table[name] = bytes;
    return name;
  }

  /// Takes the entry out before the step, after which another thread may get the same name.
  template <class Key, class Step>
  void remove(std::map<Key, std::size_t>& table, Key name, Step&& step) {
    std::unique_lock lock(mutex_);
    auto taken = table.extract(name);
    lock.unlock();
    try {
      step();
    } catch (...) {
      lock.lock();
      if (!taken.empty()) table.insert(std::move(taken));
      throw;
    }
  }

  const std::shared_ptr<driver> inner_;
  mutable std::mutex mutex_;
  mutable std::optional<fault> armed_;
  mutable bool happened_ = false;
  mutable std::vector<driver_call> calls_;
  mutable std::chrono::nanoseconds time_in_calls_{};
  std::map<address, std::size_t> ranges_;
  std::map<allocation_handle, std::size_t> handles_;
  std::map<address, std::size_t> mappings_;
  std::map<address, std::size_t> pinned_;
  std::map<address, std::size_t> async_;
  std::map<native_stream, std::size_t> streams_;
  std::map<native_event, std::size_t> events_;
};

}  // namespace

std::shared_ptr<fault_driver> fault_driver::make(std::shared_ptr<driver> inner) {
  return std::make_shared<fault_driver_impl>(std::move(inner));
}

}  // namespace evmm::test
