// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>

namespace evmm::cli {

/// Passes every call on to another driver, counts those that do something, and adds up the time
/// that all threads together spend in them. Queries that only describe the machine or a stream's
/// capture are not counted: a clock around them would cost as much as they do. Thread-safe.
class counting_driver final : public driver {
 public:
  explicit counting_driver(std::shared_ptr<driver> inner);

  std::uint64_t calls() const noexcept { return calls_.load(std::memory_order_relaxed); }
  std::chrono::nanoseconds time_in_calls() const noexcept {
    return std::chrono::nanoseconds(spent_.load(std::memory_order_relaxed));
  }

  driver_info info() const override;
  int device_count() const override;
  device_description describe(device_id device) const override;
  memory_usage usage(memory_location where) const override;
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
  void copy(address to, address from, std::size_t bytes, native_stream stream) override;
  void fill(address at, std::byte value, std::size_t bytes, native_stream stream) override;
  void store_word(address at, std::uint64_t value, native_stream stream) override;
  void wait_word(address at, std::uint64_t least, native_stream stream) override;
  void launch(native_stream stream, std::function<void()> function) override;
  capture_info capture(native_stream stream) const override;
  std::vector<process_usage> processes(device_id device) const override;
  address allocate_pinned(std::size_t bytes) override;
  void free_pinned(address at) override;
  void pin(address at, std::size_t bytes) override;
  void unpin(address at) override;
  address allocate_async(device_id device, std::size_t bytes, native_stream stream) override;
  void free_async(address at, native_stream stream) override;
  void trim_async(device_id device, std::size_t keep_bytes) override;
  async_memory async_usage(device_id device) const override;
  std::vector<graph_node> capture_frontier(native_stream stream) const override;
  std::vector<graph_node> graph_dependencies(graph_node node) const override;

 private:
  template <class Call>
  auto counted(Call&& call) const;

  const std::shared_ptr<driver> inner_;
  mutable std::atomic<std::uint64_t> calls_{0};
  mutable std::atomic<std::int64_t> spent_{0};
};

}  // namespace evmm::cli
