// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"
#include "lib/allocator/free_index.hpp"

#include <evmm/comm/symmetric_heap.hpp>

#include <algorithm>
#include <cstddef>
#include <map>
#include <optional>
#include <utility>
#include <vector>

namespace evmm {

/// One segment of the region, as the heap uses it.
struct heap_segment {
  std::size_t offset = 0;
  std::size_t bytes = 0;
  pool_id pool{};
  /// DEVICE only where every rank has device memory.
  tier kind = tier::device;
  std::size_t end() const noexcept { return offset + bytes; }
};

/// A block of the heap; `at` is its offset.
struct heap_block : block {
  native_stream stream = nullptr;
  tier_policy tiers = tier_policy::device_first;
};

/// What lies where in a symmetric heap: splitting, merging, best fit. Everything follows from the
/// calls alone, so it is the same on every rank. No driver, no addresses.
///
/// Free blocks never reach across a border between pools or tiers; live ones may.
class heap_blocks {
 public:
  static constexpr std::size_t granule = 512;
  /// What a request takes.
  static constexpr std::size_t block_bytes(std::size_t requested) {
    return (std::max<std::size_t>(requested, 1) + granule - 1) / granule * granule;
  }

  // --- memory ---------------------------------------------------------------------------------

  const std::vector<heap_segment>& segments() const noexcept { return segments_; }
  /// Replaces the segments, which begin at 0 and leave no gap. Live blocks stay where they are, and
  /// must lie within.
  void set_segments(std::vector<heap_segment> segments);
  std::size_t size() const noexcept { return segments_.empty() ? 0 : segments_.back().end(); }
  /// Index of the segment that holds `offset`, which is below size().
  std::size_t segment_at(std::size_t offset) const noexcept;

  // --- requests -------------------------------------------------------------------------------

  /// The smallest free block of this pool and tier that can serve, the lowest among equals.
  std::optional<std::size_t> find(pool_id pool, tier kind, std::size_t bytes,
                                  std::size_t alignment) const;
  /// The same among runs of neighbouring free blocks of the pool, whatever their tiers; only those
  /// that begin in tier `begins`, where one is given.
  std::optional<std::size_t> find_spanning(pool_id pool, std::size_t bytes, std::size_t alignment,
                                           std::optional<tier> begins = {}) const;
  /// How far a growth would have to reach beyond size() for a request to fit behind what is free at
  /// the end: in this pool, and in this tier unless any will do.
  std::size_t shortfall(pool_id pool, std::optional<tier> kind, std::size_t bytes,
                        std::size_t alignment) const;
  /// Makes [at, at + bytes), which is free, one live block.
  heap_block& take(std::size_t at, std::size_t bytes);
  /// The live block that begins here; null when there is none.
  heap_block* find_live(std::size_t at);
  const heap_block* find_live(std::size_t at) const;
  /// A live block becomes free.
  void put(heap_block& freed);

  // --- what there is --------------------------------------------------------------------------

  const std::map<std::size_t, heap_block>& all() const noexcept { return blocks_; }
  /// Calls `visit(heap_block&)` for each live block that touches [from, to).
  template <class Visit>
  void for_live(std::size_t from, std::size_t to, Visit&& visit) const {
    auto at = blocks_.upper_bound(from);
    if (at != blocks_.begin()) --at;
    for (; at != blocks_.end() && at->first < to; ++at) {
      if (at->second.live() && at->first + at->second.bytes > from) visit(at->second);
    }
  }
  bool any_live(std::size_t from, std::size_t to) const;
  std::size_t free_bytes() const noexcept { return free_bytes_; }
  struct free_space {
    std::size_t bytes = 0;
    std::size_t largest = 0;  ///< block
  };
  /// What is free in a pool or in all, in a tier or in both. Goes through all blocks.
  free_space free_in(std::optional<pool_id> pool, std::optional<tier> kind) const noexcept;
  /// Throws std::logic_error when the books contradict themselves.
  void check() const;

 private:
  using place = std::pair<pool_id, tier>;

  /// [from, to) is free and touches no free block of its own pool and tier.
  void insert_free(std::size_t from, std::size_t to);
  void erase_free(std::map<std::size_t, heap_block>::iterator gone);
  const free_index* index_of(pool_id pool, tier kind) const noexcept;

  std::vector<heap_segment> segments_;
  std::map<std::size_t, heap_block> blocks_;  ///< by offset; they cover [0, size()) without gaps
  std::map<place, free_index> free_;
  std::size_t free_bytes_ = 0;
};

}  // namespace evmm
