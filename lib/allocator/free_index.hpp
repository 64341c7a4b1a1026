// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace [[gnu::visibility("default")]] evmm {

/// Free blocks by size: best fit, lowest address first among equals.
///
/// Sizes fall into eight bins for each power of two. A bitmap finds the next bin in use; within a
/// bin the blocks form a treap whose priorities are hashes of the addresses, so that neither many
/// blocks of one size nor an adversary's order makes it deep. Links lie in the blocks.
class free_index {
 public:
  void insert(block* added) noexcept;
  void erase(block* gone) noexcept;
  /// The smallest block of at least `bytes`, the lowest of that size; null when there is none.
  block* best_fit(std::size_t bytes) const noexcept;
  block* largest() const noexcept;
  bool empty() const noexcept { return count_ == 0; }
  std::size_t count() const noexcept { return count_; }
  /// Calls `visit(block*)` for each block of at least `bytes`, in no useful order.
  template <class Visit>
  void for_each(std::size_t bytes, Visit&& visit) const {
    for (std::size_t bin = bin_of(bytes); bin < bins; ++bin) walk(roots_[bin], visit);
  }

 private:
  static constexpr std::size_t bins = 8 * 64;

  static std::size_t bin_of(std::size_t bytes) noexcept {
    const auto power = static_cast<std::size_t>(std::bit_width(bytes | 8) - 1);
    return power * 8 + ((bytes >> (power - 3)) & 7);
  }
  static bool less(const block* a, const block* b) noexcept {
    return a->bytes != b->bytes ? a->bytes < b->bytes : a->at < b->at;
  }
  static std::uint64_t priority(const block* of) noexcept {
    return (of->at >> 9) * 0x9e3779b97f4a7c15u;
  }
  /// The next bin in use from `first` on; bins when there is none.
  std::size_t next_used(std::size_t first) const noexcept;
  template <class Visit>
  static void walk(block* root, Visit& visit) {
    if (root == nullptr) return;
    walk(root->left, visit);
    block* const right = root->right;
    visit(root);
    walk(right, visit);
  }

  std::array<block*, bins> roots_{};
  std::array<std::uint64_t, bins / 64> used_{};
  std::size_t count_ = 0;
};

}  // namespace evmm
