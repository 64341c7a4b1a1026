// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <utility>

namespace [[gnu::visibility("default")]] evmm {

/// Runs of free addresses by size, the lowest address first among equals. The first block of a run
/// stands for it.
///
/// Sizes fall into eight bins for each power of two. A bitmap finds the next bin in use; within a
/// bin the runs form a treap whose priorities are hashes of the addresses, so that neither many
/// runs of one size nor an adversary's order makes it deep. Each knows a bound of the free blocks
/// below it, so that runs without enough memory are passed over together. Links lie in the blocks.
///
/// The run that came last stays out of its tree: programs go on where they were, so it is often the
/// next to be cut or to grow.
class free_index {
 public:
  /// `run_bytes` and `run_free` are set, and stay until it is erased.
  void insert(block* added) noexcept {
    added->bin = static_cast<std::uint16_t>(bin_of(added->run_bytes));
    if (last_ != nullptr) plant(last_);
    last_ = added;
    ++count_;
  }
  void erase(block* gone) noexcept {
    --count_;
    if (gone == last_) {
      last_ = nullptr;
    } else {
      uproot(gone);
    }
  }
  /// The smallest run with a free block of at least `bytes`, which is not 0, the lowest of that
  /// size; null when there is none.
  block* best_fit(std::size_t bytes) noexcept;
  std::size_t count() const noexcept { return count_; }
  /// Whether the trees are in order and no bound is too low: for tests.
  bool sound() const noexcept;
  /// Calls `visit(block*)` for each run of at least `bytes`, the smallest first, until it returns
  /// true.
  template <class Visit>
  void visit_until(std::size_t bytes, Visit&& visit) const {
    block* apart = last_ != nullptr && last_->run_bytes >= bytes ? last_ : nullptr;
    const auto in_order = [&](block* run) {
      if (apart != nullptr && less(apart, run) && visit(std::exchange(apart, nullptr))) return true;
      return visit(run);
    };
    if (visit_bins(bin_of(bytes),
                   [&](std::size_t bin) { return walk(roots_[bin], bytes, in_order); })) {
      return;
    }
    if (apart != nullptr) visit(apart);
  }

 private:
  static constexpr std::size_t bins = std::size_t{8} * 64;

  static std::size_t bin_of(std::size_t bytes) noexcept {
    const auto power = static_cast<std::size_t>(std::bit_width(bytes | 8) - 1);
    return power * 8 + ((bytes >> (power - 3)) & 7);
  }
  /// Without a branch, as most of what follows: which way a search goes cannot be foretold.
  static bool less(const block* a, const block* b) noexcept {
    return bool(unsigned(a->run_bytes < b->run_bytes) |
                (unsigned(a->run_bytes == b->run_bytes) & unsigned(a->at < b->at)));
  }
  static std::uint64_t priority(const block* of) noexcept {
    return (of->at >> 9) * 0x9e3779b97f4a7c15u;
  }
  void plant(block* added) noexcept;
  void uproot(block* gone) noexcept;
  /// Where the first run below `root` with a free block of `bytes`, more than none, hangs; null
  /// when there is none. Tightens bounds that had it look in vain.
  static block** first_with(block** root, std::size_t bytes) noexcept;
  /// Calls `visit(bin)` for each bin in use from `first` on until it returns true; whether it did.
  template <class Visit>
  bool visit_bins(std::size_t first, Visit&& visit) const {
    std::size_t word = first / 64;
    std::uint64_t bits = used_[word] & (~std::uint64_t{0} << (first % 64));
    for (;;) {
      for (; bits != 0; bits &= bits - 1) {
        if (visit(word * 64 + static_cast<std::size_t>(std::countr_zero(bits)))) return true;
      }
      if (++word == used_.size()) return false;
      bits = used_[word];
    }
  }
  template <class Visit>
  static bool walk(block* root, std::size_t bytes, const Visit& visit) {
    if (root == nullptr) return false;
    if (root->run_bytes < bytes) return walk(root->right, bytes, visit);
    return walk(root->left, bytes, visit) || visit(root) || walk(root->right, bytes, visit);
  }

  std::array<block*, bins> roots_{};
  std::array<std::uint64_t, bins / 64> used_{};
  block* last_ = nullptr;  ///< in no tree
  /// Where the best fit hung, until a tree changes: it is erased next, as a rule.
  block** found_ = nullptr;
  std::size_t count_ = 0;
};

}  // namespace evmm
