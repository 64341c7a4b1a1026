// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/caching_allocator.hpp>

#include <cstddef>
#include <memory>

namespace [[gnu::visibility("default")]] evmm {

/// What serves an allocator that does not cache: the driver's stream-ordered allocator, or plain
/// creation and release. Threads: any.
class other_backend {
 public:
  virtual ~other_backend() = default;
  /// Throws out_of_memory when more than `limit` bytes would be live.
  virtual void* allocate(std::size_t bytes, native_stream stream, std::size_t limit) = 0;
  virtual void free(void* at) = 0;
  virtual void record_stream(void* at, native_stream stream) = 0;
  virtual bool owns(const void* at) const noexcept = 0;
  virtual allocation_place place(const void* at) const = 0;
  virtual std::size_t empty_cache() = 0;
  virtual void enable_peer(device_id peer) = 0;
  virtual cache_information cache_info() const = 0;
  virtual void fill(allocator_statistics& into) const = 0;
  virtual void reset_peaks() = 0;
  virtual void reset_totals() = 0;
};

/// Null for the native backend.
std::unique_ptr<other_backend> make_other_backend(std::shared_ptr<driver> on, device_id device,
                                                  const allocator_options& options);

}  // namespace evmm
