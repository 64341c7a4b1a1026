// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/live_options.hpp"

#include <cstddef>
#include <cstdint>

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
              bool expandable) const noexcept;
  /// The largest free block that may serve a request of `wanted`. Where segments expand there is
  /// no limit: their blocks can always be split.
  std::size_t largest_fit(std::size_t wanted, bool expandable) const noexcept;
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
