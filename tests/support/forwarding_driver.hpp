// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <memory>
#include <utility>

namespace evmm::test {

/// Passes every call on; a test derives from it and changes one.
class forwarding_driver : public driver {
 public:
  explicit forwarding_driver(std::shared_ptr<driver> inner) : inner_(std::move(inner)) {}

  driver_info info() const override { return inner_->info(); }
  int device_count() const override { return inner_->device_count(); }
  device_description describe(device_id device) const override { return inner_->describe(device); }
  memory_usage usage(memory_location where) const override { return inner_->usage(where); }
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
    return inner_->reserve(bytes, alignment, hint);
  }
  void free(address base, std::size_t bytes) override { inner_->free(base, bytes); }
  allocation_handle create(const allocation_request& request) override {
    return inner_->create(request);
  }
  void release(allocation_handle handle) override { inner_->release(handle); }
  void map(address at, std::size_t bytes, allocation_handle handle) override {
    inner_->map(at, bytes, handle);
  }
  void unmap(address at, std::size_t bytes) override { inner_->unmap(at, bytes); }
  void set_access(address at, std::size_t bytes, std::span<const access_grant> grants) override {
    inner_->set_access(at, bytes, grants);
  }
  unique_fd export_fd(allocation_handle handle) override { return inner_->export_fd(handle); }
  allocation_handle import_fd(int fd, const allocation_request& request) override {
    return inner_->import_fd(fd, request);
  }
  fabric_handle export_fabric(allocation_handle handle) override {
    return inner_->export_fabric(handle);
  }
  allocation_handle import_fabric(const fabric_handle& shared,
                                  const allocation_request& request) override {
    return inner_->import_fabric(shared, request);
  }
  address allocate_pinned(std::size_t bytes) override { return inner_->allocate_pinned(bytes); }
  void free_pinned(address at) override { inner_->free_pinned(at); }
  void pin(address at, std::size_t bytes) override { inner_->pin(at, bytes); }
  void unpin(address at) override { inner_->unpin(at); }
  native_stream create_stream(device_id device) override { return inner_->create_stream(device); }
  void destroy_stream(native_stream stream) override { inner_->destroy_stream(stream); }
  void synchronize(native_stream stream) override { inner_->synchronize(stream); }
  bool idle(native_stream stream) override { return inner_->idle(stream); }
  native_event create_event(device_id device) override { return inner_->create_event(device); }
  void destroy_event(native_event event) override { inner_->destroy_event(event); }
  void record(native_event event, native_stream stream) override { inner_->record(event, stream); }
  bool done(native_event event) override { return inner_->done(event); }
  void synchronize(native_event event) override { inner_->synchronize(event); }
  void wait(native_stream stream, native_event event) override { inner_->wait(stream, event); }
  address allocate_async(device_id device, std::size_t bytes, native_stream stream) override {
    return inner_->allocate_async(device, bytes, stream);
  }
  void free_async(address at, native_stream stream) override { inner_->free_async(at, stream); }
  void trim_async(device_id device, std::size_t keep_bytes) override {
    inner_->trim_async(device, keep_bytes);
  }
  async_memory async_usage(device_id device) const override { return inner_->async_usage(device); }
  void copy(address to, address from, std::size_t bytes, native_stream stream) override {
    inner_->copy(to, from, bytes, stream);
  }
  void fill(address at, std::byte value, std::size_t bytes, native_stream stream) override {
    inner_->fill(at, value, bytes, stream);
  }
  void store_word(address at, std::uint64_t value, native_stream stream) override {
    inner_->store_word(at, value, stream);
  }
  void wait_word(address at, std::uint64_t least, native_stream stream) override {
    inner_->wait_word(at, least, stream);
  }
  void launch(native_stream stream, std::function<void()> function) override {
    inner_->launch(stream, std::move(function));
  }
  capture_info capture(native_stream stream) const override { return inner_->capture(stream); }
  std::vector<graph_node> capture_frontier(native_stream stream) const override {
    return inner_->capture_frontier(stream);
  }
  std::vector<graph_node> graph_dependencies(graph_node node) const override {
    return inner_->graph_dependencies(node);
  }

  driver& inner() { return *inner_; }

 private:
  std::shared_ptr<driver> inner_;
};

/// Kernels reach nothing of what it has, as of ordinary memory on CUDA.
class unreached final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  bool kernels_reach(address) const override { return false; }
};

}  // namespace evmm::test
