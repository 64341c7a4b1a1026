// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/driver.hpp>
#include <evmm/error.hpp>

#include <cstddef>
#include <cstdio>
#include <memory>
#include <utility>
#include <vector>

namespace moe {

/// What a rank computes on: a device, one stream, and an allocator whose blocks are used in the
/// order of that stream.
struct device_memory {
  std::shared_ptr<evmm::driver> on;
  evmm::device_id device;
  evmm::native_stream stream = nullptr;
  evmm::caching_allocator allocator;

  device_memory(const std::shared_ptr<evmm::driver>& driver, evmm::device_id of)
      : on(driver), device(of), stream(driver->create_stream(of)), allocator(driver, of) {}
  device_memory(const device_memory&) = delete;
  device_memory& operator=(const device_memory&) = delete;
  ~device_memory() {
    try {
      on->synchronize(stream);
      allocator.empty_cache();
      on->destroy_stream(stream);
    } catch (const evmm::error& failure) {  // of the stream's work; who waited was told
      std::fprintf(stderr, "%s\n", failure.what());
    }
  }

  /// Waits, since ordinary memory of the CPU may be gone after it.
  void copy(void* to, const void* from, std::size_t bytes) {
    enqueue_copy(to, from, bytes);
    on->synchronize(stream);
  }
  void enqueue_copy(void* to, const void* from, std::size_t bytes) {
    if (bytes == 0) return;
    on->copy(reinterpret_cast<evmm::address>(to), reinterpret_cast<evmm::address>(from), bytes,
             stream);
  }
};

/// An array on the device. Contents are undefined at first.
template <class T>
class device_array {
 public:
  device_array() = default;
  device_array(device_memory& memory, std::size_t count)
      : memory_(&memory),
        data_(static_cast<T*>(memory.allocator.allocate(count * sizeof(T), memory.stream))),
        count_(count) {}
  device_array(device_memory& memory, const std::vector<T>& values)
      : device_array(memory, values.size()) {
    assign(values);
  }
  device_array(device_array&& other) noexcept { swap(other); }
  device_array& operator=(device_array&& other) noexcept {
    device_array(std::move(other)).swap(*this);
    return *this;
  }
  ~device_array() {
    if (data_ != nullptr) memory_->allocator.free(data_);
  }

  T* data() const { return data_; }
  std::size_t size() const { return count_; }
  void assign(const std::vector<T>& values) {
    memory_->copy(data_, values.data(), values.size() * sizeof(T));
  }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    if (count_ != 0) memory_->copy(values.data(), data_, count_ * sizeof(T));
    return values;
  }

 private:
  void swap(device_array& other) noexcept {
    std::swap(memory_, other.memory_);
    std::swap(data_, other.data_);
    std::swap(count_, other.count_);
  }

  device_memory* memory_ = nullptr;
  T* data_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace moe
