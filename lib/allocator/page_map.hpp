// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"

#include <atomic>
#include <cstddef>
#include <map>
#include <memory>
#include <shared_mutex>

namespace [[gnu::visibility("default")]] evmm {

/// The segment that an address belongs to.
///
/// Two levels over pages of 2 MiB, which is what device memory comes in; lookups take no lock.
/// Segments that do not lie on pages (memory of users) are found in a tree behind a lock.
/// Threads: find() from any; add() and remove() one at a time.
class page_map {
 public:
  page_map();
  ~page_map();
  page_map(const page_map&) = delete;
  page_map& operator=(const page_map&) = delete;

  segment_record* find(address at) const noexcept {
    if (at >> (leaf_bits + page_bits + root_bits) == 0) {
      const leaf* pages = roots_[at >> (leaf_bits + page_bits)].load(std::memory_order_acquire);
      if (pages != nullptr) {
        const auto page = (at >> page_bits) & ((std::size_t{1} << leaf_bits) - 1);
        if (auto* found = pages->of[page].load(std::memory_order_acquire)) return found;
      }
    }
    return uneven_ == 0 ? nullptr : find_uneven(at);
  }
  /// Whether anything in [at, at + bytes) belongs to a segment.
  bool any_in(address at, std::size_t bytes) const noexcept;
  /// [at, at + bytes) belongs to `segment` from now on. Strong guarantee.
  void add(address at, std::size_t bytes, segment_record* segment);
  void remove(address at, std::size_t bytes) noexcept;
  /// Knows nothing any more, and frees nothing: for a forked child.
  void forget() noexcept;

 private:
  static constexpr int page_bits = 21;
  static constexpr int leaf_bits = 13;
  static constexpr int root_bits = 14;  // 48 bits of address in all

  struct leaf {
    std::atomic<segment_record*> of[std::size_t{1} << leaf_bits];
  };
  struct extent {
    std::size_t bytes;
    segment_record* segment;
  };
  static bool even(address at, std::size_t bytes) noexcept;
  segment_record* find_uneven(address at) const noexcept;

  std::unique_ptr<std::atomic<leaf*>[]> roots_;
  std::atomic<std::size_t> uneven_ = 0;
  mutable std::shared_mutex guard_;
  std::map<address, extent> extents_;
};

}  // namespace evmm
