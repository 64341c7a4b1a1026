// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/cuda/cuda_api.hpp"
#include "lib/driver/cuda/cuda_context.hpp"
#include "lib/driver/cuda/host_function.hpp"
#include "lib/driver/cuda/span_ledger.hpp"
#include "lib/driver/cuda/vmm_ledger.hpp"
#include "lib/support/fork_guard.hpp"

#include <evmm/driver.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <source_location>
#include <string>
#include <string_view>
#include <vector>

namespace evmm {

/// The driver over libcuda. What is here: cuda_driver.cpp; addresses, memory and sharing:
/// cuda_memory.cpp; page-locked and stream-ordered memory: cuda_pools.cpp; streams, events and
/// work: cuda_streams.cpp.
class cuda_driver final : public driver {
 public:
  explicit cuda_driver(const cuda_library& library);
  ~cuda_driver() override;

  driver_info info() const override;
  int device_count() const override;
  device_description describe(device_id device) const override;
  memory_usage usage(memory_location where) const override;
  std::vector<process_usage> processes(device_id device) const override;
  bool can_access(device_id from, device_id to) const override;
  bool kernels_reach(address at) const override;
  std::optional<device_id> current_device() const override;
  void set_current_device(std::optional<device_id> device) override;
  std::vector<numa_node> numa_nodes() const override;

  std::size_t granularity(memory_location where) const override;
  address reserve(std::size_t bytes, std::size_t alignment, address hint) override;
  void free(address base, std::size_t bytes) override;

  allocation_handle create(const allocation_request& request) override;
  void release(allocation_handle handle) override;

  void map(address at, std::size_t bytes, allocation_handle handle) override;
  void unmap(address at, std::size_t bytes) override;
  void set_access(address at, std::size_t bytes, std::span<const access_grant> grants) override;

  unique_fd export_fd(allocation_handle handle) override;
  allocation_handle import_fd(int fd, const allocation_request& request) override;
  fabric_handle export_fabric(allocation_handle handle) override;
  allocation_handle import_fabric(const fabric_handle& shared,
                                  const allocation_request& request) override;

  address allocate_pinned(std::size_t bytes) override;
  void free_pinned(address at) override;
  void pin(address at, std::size_t bytes) override;
  void unpin(address at) override;

  native_stream create_stream(device_id device) override;
  void destroy_stream(native_stream stream) override;
  void synchronize(native_stream stream) override;
  bool idle(native_stream stream) override;
  native_event create_event(device_id device) override;
  void destroy_event(native_event event) override;
  void record(native_event event, native_stream stream) override;
  bool done(native_event event) override;
  void synchronize(native_event event) override;
  void wait(native_stream stream, native_event event) override;

  address allocate_async(device_id device, std::size_t bytes, native_stream stream) override;
  void free_async(address at, native_stream stream) override;
  void trim_async(device_id device, std::size_t keep_bytes) override;
  async_memory async_usage(device_id device) const override;

  void copy(address to, address from, std::size_t bytes, native_stream stream) override;
  void fill(address at, std::byte value, std::size_t bytes, native_stream stream) override;
  void store_word(address at, std::uint64_t value, native_stream stream) override;
  void wait_word(address at, std::uint64_t least, native_stream stream) override;
  void launch(native_stream stream, std::function<void()> function) override;
  capture_info capture(native_stream stream) const override;
  std::vector<graph_node> capture_frontier(native_stream stream) const override;
  std::vector<graph_node> graph_dependencies(graph_node node) const override;

 private:
  struct device_entry {
    CUdevice device = 0;
    device_description description;
    bool virtual_memory = false;
    bool fd_sharing = false;
    bool fabric_sharing = false;  ///< as the attribute says, which is not enough
    std::size_t granularity = 0;  ///< the largest that any request for it may need
  };

  /// Throws invalid_argument in a forked child, and in a function that a stream runs: CUDA may
  /// refuse, or wait there for itself.
  void check_caller() const {
    process_.check();
    if (in_host_function()) throw_in_host_function();
  }
  [[noreturn]] static void throw_in_host_function();
  /// The entry of a device. Throws invalid_argument when there is none.
  const device_entry& entry(device_id device,
                            std::source_location where = std::source_location::current()) const;
  device_entry look_at(int ordinal) const;
  /// Throws invalid_argument for a node that has no memory.
  void check_node(int node, std::source_location where = std::source_location::current()) const;
  CUmemAllocationProp properties(const allocation_request& request) const;
  /// Throws invalid_argument unless `value` is a multiple of `unit` and not 0.
  void check_multiple(std::string_view what, std::size_t value, std::size_t unit) const;
  void check_request(const allocation_request& request) const;
  [[noreturn]] void throw_create_error(CUresult result, const allocation_request& request) const;
  [[noreturn]] void throw_pin_error(CUresult result, std::size_t bytes) const;
  CUmemoryPool pool(device_id device) const;
  /// Throws unsupported when the stream is being captured.
  void check_not_captured(native_stream stream, const char* doing) const;
  bool fabric_works() const;
  bool prove_fabric() const;

  const cuda_library& library_;
  const cuda_api& api_;
  fork_guard process_;
  std::vector<device_entry> devices_;
  std::vector<numa_node> nodes_;
  std::size_t host_granularity_ = 0;  ///< 0 when there is no HOST_NUMA memory
  std::size_t unit_ = 0;              ///< of addresses: the largest granularity of any location
  mutable primary_contexts contexts_;
  vmm_ledger ledger_;
  span_ledger pinned_;                              ///< from allocate_pinned
  span_ledger registered_;                          ///< by pin
  span_ledger async_;                               ///< from allocate_async
  std::unique_ptr<std::atomic<bool>[]> pool_kept_;  ///< by device: its pool keeps what is freed
  std::shared_ptr<host_failures> failures_ = std::make_shared<host_failures>();
  mutable std::once_flag fabric_once_;
  mutable bool fabric_works_ = false;
};

}  // namespace evmm
