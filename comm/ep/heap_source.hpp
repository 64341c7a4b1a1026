// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/owned_pool.hpp"
#include "comm/heap/heap_blocks.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/memory/segment_plan.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/footprint.hpp>
#include <evmm/error.hpp>

#include <cstddef>
#include <optional>

namespace evmm::ep {

/// Whether a region grows in larger steps than it is asked to before it has so many segments more.
inline bool segments_run_short(const symmetric_region& region, std::size_t more) {
  const segment_limits limits{.reserved = region.reserved(),
                              .granularity = region.granularity(),
                              .max_segments = region.max_segments(),
                              .max_segment_bytes = region.reserved()};
  const std::size_t before_last = region.segments(region.ranks().rank()).size() + more - 1;
  return before_last >= limits.max_segments || region.size() >= limits.reserved ||
         next_segment_bytes(limits, region.size(), before_last, 1) > limits.granularity;
}

/// Collective: `take` takes memory of a heap, up to so many segments of its own among it. What
/// objects that are gone had in segments of theirs lies free at the heap's end: it is given back
/// where segments or memory run short.
template <class Take>
void take_with_segments(symmetric_heap& heap, std::size_t segments, const Take& take) {
  if (segments > 0 && segments_run_short(heap.region(), segments)) heap.trim();
  try {
    take();
  } catch (const out_of_memory&) {  // on all ranks
    if (segments == 0 || heap.trim() == 0) throw;
    take();
  }
}

/// Where an object's buffers come from: a heap, or nowhere, to tell what they would take. So that
/// what is told is what is taken, both go through the same code. All calls are the heap's.
class heap_source {
 public:
  explicit heap_source(symmetric_heap& heap)
      : heap_(&heap), granularity_(heap.region().granularity()) {}
  explicit heap_source(const job_shape& job) : granularity_(job.granularity) {}

  /// Null where nothing is taken.
  symmetric_heap* heap() const { return heap_; }
  std::size_t granularity() const { return granularity_; }
  const heap_footprint& taken() const { return taken_; }

  /// A buffer on the device; an empty one where nothing is taken.
  template <class T>
  symmetric_buffer<T> make(std::size_t count, std::size_t alignment = 512) {
    taken_.device_bytes += heap_blocks::block_bytes(count * sizeof(T));
    if (heap_ == nullptr) return {};
    return {*heap_, count, nullptr, {.tiers = tier_policy::device_only, .alignment = alignment}};
  }
  /// Segments of a pool, which is there where something is taken.
  void grow(tier kind, std::size_t bytes, const std::optional<owned_pool>& pool) {
    if (heap_ != nullptr) bytes = heap_->grow(kind, bytes, pool->id()).bytes;
    (kind == tier::device ? taken_.device_bytes : taken_.host_bytes) += bytes;
  }
  /// The blocks may have been another stream's: the default stream, for which they were made, waits
  /// for its work, and this waits for that. From then on any stream may use them, and any peer that
  /// has heard of it.
  void settle() const {
    if (heap_ == nullptr) return;
    const symmetric_region& region = heap_->region();
    const device_scope scope(region.on(), region.device());
    region.on().synchronize(native_stream{});
  }

 private:
  symmetric_heap* heap_ = nullptr;
  std::size_t granularity_;
  heap_footprint taken_;
};

}  // namespace evmm::ep
