// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/free_index.hpp"

#include <algorithm>

namespace evmm {

std::size_t free_index::next_used(std::size_t first) const noexcept {
  if (first >= bins) return bins;
  std::size_t word = first / 64;
  std::uint64_t bits = used_[word] & (~std::uint64_t{0} << (first % 64));
  while (bits == 0) {
    if (++word == used_.size()) return bins;
    bits = used_[word];
  }
  return word * 64 + static_cast<std::size_t>(std::countr_zero(bits));
}

// A bound may be too high for a while: what leaves a tree does not lower those above it.

void free_index::plant(block* added) noexcept {
  const std::size_t bin = bin_of(added->run_bytes);
  block** link = &roots_[bin];
  const std::uint64_t own = priority(added);
  while (*link != nullptr && priority(*link) >= own) {
    block* const above = *link;
    above->most_free = std::max(above->most_free, added->run_free);
    link = less(added, above) ? &above->left : &above->right;
  }
  // Split what was here into those below and those above.
  block* rest = *link;
  added->most_free = std::max(added->run_free, rest != nullptr ? rest->most_free : 0);
  *link = added;
  block** below = &added->left;
  block** above = &added->right;
  while (rest != nullptr) {
    if (less(rest, added)) {
      *below = rest;
      below = &rest->right;
      rest = *below;
    } else {
      *above = rest;
      above = &rest->left;
      rest = *above;
    }
  }
  *below = *above = nullptr;
  used_[bin / 64] |= std::uint64_t{1} << (bin % 64);
}

void free_index::uproot(block* gone) noexcept {
  const std::size_t bin = bin_of(gone->run_bytes);
  block** link = &roots_[bin];
  while (*link != gone) link = less(gone, *link) ? &(*link)->left : &(*link)->right;
  block* below = gone->left;
  block* above = gone->right;
  while (below != nullptr && above != nullptr) {
    const std::size_t most = std::max(below->most_free, above->most_free);
    if (priority(below) > priority(above)) {
      *link = below;
      below->most_free = most;
      link = &below->right;
      below = *link;
    } else {
      *link = above;
      above->most_free = most;
      link = &above->left;
      above = *link;
    }
  }
  *link = below != nullptr ? below : above;
  if (roots_[bin] == nullptr) used_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
}

block* free_index::first_with(block* root, std::size_t bytes) noexcept {
  if (root == nullptr || root->most_free < bytes) return nullptr;
  if (block* const found = first_with(root->left, bytes)) return found;
  if (root->run_free >= bytes) return root;
  if (block* const found = first_with(root->right, bytes)) return found;
  const auto bound = [](const block* of) { return of != nullptr ? of->most_free : 0; };
  root->most_free = std::max({root->run_free, bound(root->left), bound(root->right)});
  return nullptr;
}

block* free_index::best_fit(std::size_t bytes) noexcept {
  block* const last = last_ != nullptr && last_->run_free >= bytes ? last_ : nullptr;
  const std::size_t end = last != nullptr ? bin_of(last->run_bytes) + 1 : bins;
  for (std::size_t bin = next_used(bin_of(bytes)); bin < end; bin = next_used(bin + 1)) {
    if (block* const found = first_with(roots_[bin], bytes)) {
      return last != nullptr && less(last, found) ? last : found;
    }
  }
  return last;
}

}  // namespace evmm
