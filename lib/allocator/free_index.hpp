// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>

namespace [[gnu::visibility("default")]] evmm {

/// Runs of free addresses by size: best fit, lowest address first among equals. The first block of
/// a run stands for it.
///
/// Sizes fall into eight bins for each power of two. A bitmap finds the next bin in use; within a
/// bin the runs form a treap whose priorities are hashes of the addresses, so that neither many
/// runs of one size nor an adversary's order makes it deep. Links lie in the blocks.
class free_index {
 public:
  void insert(block* added) noexcept;
  void erase(block* gone) noexcept;
  /// The smallest run of at least `bytes`, the lowest of that size; null when there is none.
  block* best_fit(std::size_t bytes) const noexcept;
  std::size_t count() const noexcept { return count_; }
  /// Calls `visit(block*)` for each run of at least `bytes`, the best fit first, until it returns
  /// true.
  template <class Visit>
  void visit_until(std::size_t bytes, Visit&& visit) const {
    for (std::size_t bin = next_used(bin_of(bytes)); bin < bins; bin = next_used(bin + 1)) {
      if (walk(roots_[bin], bytes, visit)) return;
    }
  }

 private:
  static constexpr std::size_t bins = 8 * 64;

  static std::size_t bin_of(std::size_t bytes) noexcept {
    const auto power = static_cast<std::size_t>(std::bit_width(bytes | 8) - 1);
    return power * 8 + ((bytes >> (power - 3)) & 7);
  }
  static bool less(const block* a, const block* b) noexcept {
    return a->run_bytes != b->run_bytes ? a->run_bytes < b->run_bytes : a->at < b->at;
  }
  static std::uint64_t priority(const block* of) noexcept {
    return (of->at >> 9) * 0x9e3779b97f4a7c15u;
  }
  /// The next bin in use from `first` on; bins when there is none.
  std::size_t next_used(std::size_t first) const noexcept;
  template <class Visit>
  static bool walk(block* root, std::size_t bytes, Visit& visit) {
    if (root == nullptr) return false;
    if (root->run_bytes < bytes) return walk(root->right, bytes, visit);
    return walk(root->left, bytes, visit) || visit(root) || walk(root->right, bytes, visit);
  }

  std::array<block*, bins> roots_{};
  std::array<std::uint64_t, bins / 64> used_{};
  std::size_t count_ = 0;
};

}  // namespace evmm
