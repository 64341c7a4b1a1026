// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/counting_driver.hpp"

#include <utility>

namespace evmm::cli {

counting_driver::counting_driver(std::shared_ptr<driver> inner) : inner_(std::move(inner)) {}

/// A call counts when it ends, however it ends.
template <class Call>
auto counting_driver::counted(Call&& call) const {
  struct at_end {
    const counting_driver& self;
    std::chrono::steady_clock::time_point begin = std::chrono::steady_clock::now();
    ~at_end() {
      const std::chrono::nanoseconds spent = std::chrono::steady_clock::now() - begin;
      self.calls_.fetch_add(1, std::memory_order_relaxed);
      self.spent_.fetch_add(spent.count(), std::memory_order_relaxed);
    }
  } const written{*this};
  return call();
}

driver_info counting_driver::info() const {
  return inner_->info();
}
int counting_driver::device_count() const {
  return inner_->device_count();
}
device_description counting_driver::describe(device_id device) const {
  return inner_->describe(device);
}
memory_usage counting_driver::usage(memory_location where) const {
  return counted([&] { return inner_->usage(where); });
}
bool counting_driver::can_access(device_id from, device_id to) const {
  return inner_->can_access(from, to);
}
bool counting_driver::kernels_reach(address at) const {
  return inner_->kernels_reach(at);
}
std::optional<device_id> counting_driver::current_device() const {
  return inner_->current_device();
}
void counting_driver::set_current_device(std::optional<device_id> device) {
  inner_->set_current_device(device);
}
std::vector<numa_node> counting_driver::numa_nodes() const {
  return inner_->numa_nodes();
}
std::size_t counting_driver::granularity(memory_location where) const {
  return inner_->granularity(where);
}
address counting_driver::reserve(std::size_t bytes, std::size_t alignment, address hint) {
  return counted([&] { return inner_->reserve(bytes, alignment, hint); });
}
void counting_driver::free(address base, std::size_t bytes) {
  counted([&] { inner_->free(base, bytes); });
}
allocation_handle counting_driver::create(const allocation_request& request) {
  return counted([&] { return inner_->create(request); });
}
void counting_driver::release(allocation_handle handle) {
  counted([&] { inner_->release(handle); });
}
void counting_driver::map(address at, std::size_t bytes, allocation_handle handle) {
  counted([&] { inner_->map(at, bytes, handle); });
}
void counting_driver::unmap(address at, std::size_t bytes) {
  counted([&] { inner_->unmap(at, bytes); });
}
void counting_driver::set_access(address at, std::size_t bytes,
                                 std::span<const access_grant> grants) {
  counted([&] { inner_->set_access(at, bytes, grants); });
}
unique_fd counting_driver::export_fd(allocation_handle handle) {
  return counted([&] { return inner_->export_fd(handle); });
}
allocation_handle counting_driver::import_fd(int fd, const allocation_request& request) {
  return counted([&] { return inner_->import_fd(fd, request); });
}
fabric_handle counting_driver::export_fabric(allocation_handle handle) {
  return counted([&] { return inner_->export_fabric(handle); });
}
allocation_handle counting_driver::import_fabric(const fabric_handle& shared,
                                                 const allocation_request& request) {
  return counted([&] { return inner_->import_fabric(shared, request); });
}
native_stream counting_driver::create_stream(device_id device) {
  return counted([&] { return inner_->create_stream(device); });
}
void counting_driver::destroy_stream(native_stream stream) {
  counted([&] { inner_->destroy_stream(stream); });
}
void counting_driver::synchronize(native_stream stream) {
  counted([&] { inner_->synchronize(stream); });
}
bool counting_driver::idle(native_stream stream) {
  return counted([&] { return inner_->idle(stream); });
}
native_event counting_driver::create_event(device_id device) {
  return counted([&] { return inner_->create_event(device); });
}
void counting_driver::destroy_event(native_event event) {
  counted([&] { inner_->destroy_event(event); });
}
void counting_driver::record(native_event event, native_stream stream) {
  counted([&] { inner_->record(event, stream); });
}
bool counting_driver::done(native_event event) {
  return counted([&] { return inner_->done(event); });
}
void counting_driver::synchronize(native_event event) {
  counted([&] { inner_->synchronize(event); });
}
void counting_driver::wait(native_stream stream, native_event event) {
  counted([&] { inner_->wait(stream, event); });
}
void counting_driver::copy(address to, address from, std::size_t bytes, native_stream stream) {
  counted([&] { inner_->copy(to, from, bytes, stream); });
}
void counting_driver::fill(address at, std::byte value, std::size_t bytes, native_stream stream) {
  counted([&] { inner_->fill(at, value, bytes, stream); });
}
void counting_driver::store_word(address at, std::uint64_t value, native_stream stream) {
  counted([&] { inner_->store_word(at, value, stream); });
}
void counting_driver::wait_word(address at, std::uint64_t least, native_stream stream) {
  counted([&] { inner_->wait_word(at, least, stream); });
}
void counting_driver::launch(native_stream stream, std::function<void()> function) {
  counted([&] { inner_->launch(stream, std::move(function)); });
}
capture_info counting_driver::capture(native_stream stream) const {
  return inner_->capture(stream);
}

std::vector<process_usage> counting_driver::processes(device_id device) const {
  return inner_->processes(device);
}
address counting_driver::allocate_pinned(std::size_t bytes) {
  return counted([&] { return inner_->allocate_pinned(bytes); });
}
void counting_driver::free_pinned(address at) {
  counted([&] { inner_->free_pinned(at); });
}
void counting_driver::pin(address at, std::size_t bytes) {
  counted([&] { inner_->pin(at, bytes); });
}
void counting_driver::unpin(address at) {
  counted([&] { inner_->unpin(at); });
}
address counting_driver::allocate_async(device_id device, std::size_t bytes, native_stream stream) {
  return counted([&] { return inner_->allocate_async(device, bytes, stream); });
}
void counting_driver::free_async(address at, native_stream stream) {
  counted([&] { inner_->free_async(at, stream); });
}
void counting_driver::trim_async(device_id device, std::size_t keep_bytes) {
  counted([&] { inner_->trim_async(device, keep_bytes); });
}
async_memory counting_driver::async_usage(device_id device) const {
  return inner_->async_usage(device);
}
std::vector<graph_node> counting_driver::capture_frontier(native_stream stream) const {
  return inner_->capture_frontier(stream);
}
std::vector<graph_node> counting_driver::graph_dependencies(graph_node node) const {
  return inner_->graph_dependencies(node);
}

}  // namespace evmm::cli
