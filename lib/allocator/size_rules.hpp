// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/live_options.hpp"

#include <cstddef>
#include <cstdint>
#include <limits>

namespace [[gnu::visibility("default")]] evmm {

enum class size_class : std::uint8_t { small, large };

/// What PyTorch's allocator decides from a size alone.
class size_rules {
 public:
  explicit size_rules(const live_options& options) : options_(options) {}

  /// The block for a request: a multiple of min_block, or a step between powers of two where
  /// roundup_power2_divisions says so.
  std::size_t round(std::size_t bytes) const noexcept {
    const allocator_options& now = options_.now();
    const std::size_t least = now.min_block;
    if (bytes <= least) return least;
    if (now.roundup_power2_divisions.empty()) return (bytes + least - 1) & ~(least - 1);
    return round_by_divisions(bytes);
  }
  size_class class_of(std::size_t block_bytes) const noexcept {
    return block_bytes <= options_.now().small_limit ? size_class::small : size_class::large;
  }
  /// What a segment of one handle takes for a block.
  std::size_t segment_bytes(std::size_t block_bytes) const noexcept;
  /// Whether a free block of `bytes` gives up what is left of it after `taken`.
  bool splits(size_class kind, std::size_t bytes, std::size_t taken,
              bool expandable) const noexcept {
    const allocator_options& now = options_.now();
    const std::size_t rest = bytes - taken;
    if (kind == size_class::small || expandable) return rest >= now.min_block;
    if (now.max_split_size && taken >= *now.max_split_size) return false;
    return rest > now.small_limit;
  }
  /// The largest free block that may serve a request of `wanted`. Where segments expand there is
  /// no limit: their blocks can always be split.
  std::size_t largest_fit(std::size_t wanted, bool expandable) const noexcept {
    const allocator_options& now = options_.now();
    constexpr std::size_t any = std::numeric_limits<std::size_t>::max();
    if (expandable || !now.max_split_size) return any;
    if (wanted < *now.max_split_size) return *now.max_split_size - 1;
    const std::size_t slack = now.max_non_split_rounding.value_or(now.large_segment);
    return wanted > any - slack ? any : wanted + slack - 1;
  }
  /// Whether a block counts as oversize (max_split_size).
  bool oversize(std::size_t bytes) const noexcept {
    const auto& limit = options_.now().max_split_size;
    return limit && bytes >= *limit;
  }

 private:
  std::size_t round_by_divisions(std::size_t bytes) const noexcept;

  const live_options& options_;
};

}  // namespace evmm
