// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/error.hpp>

#include <cstddef>
#include <limits>
#include <span>
#include <string>
#include <type_traits>
#include <utility>

namespace [[gnu::visibility("default")]] evmm {

/// An array of `T` at the same offset on every rank, freed with the object.
///
/// Addresses, threads, streams, errors: as symmetric_heap, which must outlive it (a closed one
///   will do). Construction and destruction are calls of the heap: the same on every rank, in the
///   same order. Contents are undefined at first.
template <class T>
class symmetric_buffer {
  static_assert(std::is_trivially_copyable_v<T>, "peers see the bytes, not the objects");

 public:
  /// An empty one.
  symmetric_buffer() = default;
  /// `count` elements. Throws as symmetric_heap::allocate.
  symmetric_buffer(symmetric_heap& heap, std::size_t count, native_stream stream = nullptr,
                   symmetric_request request = {})
      : heap_(&heap), count_(count) {
    if (count > std::numeric_limits<std::size_t>::max() / sizeof(T)) {
      throw invalid_argument("cannot allocate " + std::to_string(count) + " elements of " +
                             std::to_string(sizeof(T)) + " bytes: the size overflows");
    }
    if (request.alignment < alignof(T)) request.alignment = alignof(T);
    offset_ = heap.allocate(count * sizeof(T), stream, request);
  }
  symmetric_buffer(symmetric_buffer&& other) noexcept
      : heap_(std::exchange(other.heap_, nullptr)), offset_(other.offset_), count_(other.count_) {}
  symmetric_buffer& operator=(symmetric_buffer&& other) noexcept {
    if (this != &other) {
      reset();
      heap_ = std::exchange(other.heap_, nullptr);
      offset_ = other.offset_;
      count_ = other.count_;
    }
    return *this;
  }
  ~symmetric_buffer() { reset(); }

  /// Frees it now. What free() throws is logged, not thrown.
  void reset() noexcept {
    if (heap_ != nullptr) std::exchange(heap_, nullptr)->release(offset_);
  }

  explicit operator bool() const noexcept { return heap_ != nullptr; }
  std::size_t offset() const noexcept { return offset_; }
  /// Elements.
  std::size_t size() const noexcept { return heap_ != nullptr ? count_ : 0; }
  std::size_t bytes() const noexcept { return size() * sizeof(T); }
  /// This rank's elements. On the device unless the host tier holds them.
  T* local() const { return reinterpret_cast<T*>(heap_->local(offset_)); }
  /// A node peer's. Throws unsupported for a rank of another node.
  T* peer(rank_id rank) const { return reinterpret_cast<T*>(heap_->peer(rank, offset_)); }
  std::span<T> elements() const {
    return heap_ != nullptr ? std::span<T>{local(), count_} : std::span<T>{};
  }
  void record_stream(native_stream stream) const { heap_->record_stream(offset_, stream); }
  symmetric_heap& heap() const noexcept { return *heap_; }

 private:
  symmetric_heap* heap_ = nullptr;
  std::size_t offset_ = 0;
  std::size_t count_ = 0;
};

}  // namespace evmm
