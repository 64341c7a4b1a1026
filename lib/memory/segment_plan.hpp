// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <span>
#include <vector>

// How a region's segments are sized: arithmetic alone, the same on every rank.

namespace [[gnu::visibility("default")]] evmm {

/// What decides the size of a segment.
struct segment_limits {
  std::size_t reserved = 0;
  std::size_t granularity = 0;
  std::size_t max_segments = 0;
  std::size_t max_segment_bytes = 0;
};

/// `bytes` rounded up to a multiple of `granularity`. Throws invalid_argument when it overflows.
std::size_t round_up(std::size_t bytes, std::size_t granularity);

/// Size of the next segment of a region that has `segments` of them in `size` bytes and is asked
/// to grow by `bytes`. Exact (rounded up) while the slots left could still reach the reservation
/// in steps of half the size; then as much more as keeps that true, at most half the size.
/// Throws invalid_argument for 0 bytes, beyond the reservation, or without a slot left.
std::size_t next_segment_bytes(const segment_limits& limits, std::size_t size, std::size_t segments,
                               std::size_t bytes);

/// The segments that a growth by `bytes` appends: next_segment_bytes, cut into equal parts of at
/// most `max_segment_bytes` as long as half of the slots stay free for later.
std::vector<std::size_t> plan_growth(const segment_limits& limits, std::size_t size,
                                     std::size_t segments, std::size_t bytes);

/// How many of the last segments fit, whole, into `bytes`.
std::size_t tail_segments_within(std::span<const std::size_t> sizes, std::size_t bytes);

}  // namespace evmm
