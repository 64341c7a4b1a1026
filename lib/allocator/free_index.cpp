// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/free_index.hpp"

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

void free_index::insert(block* added) noexcept {
  const std::size_t bin = bin_of(added->run_bytes);
  block** link = &roots_[bin];
  const std::uint64_t own = priority(added);
  while (*link != nullptr && priority(*link) >= own) {
    link = less(added, *link) ? &(*link)->left : &(*link)->right;
  }
  // Split what was here into those below and those above.
  block* rest = *link;
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
  ++count_;
}

void free_index::erase(block* gone) noexcept {
  const std::size_t bin = bin_of(gone->run_bytes);
  block** link = &roots_[bin];
  while (*link != gone) link = less(gone, *link) ? &(*link)->left : &(*link)->right;
  block* below = gone->left;
  block* above = gone->right;
  while (below != nullptr && above != nullptr) {
    if (priority(below) > priority(above)) {
      *link = below;
      link = &below->right;
      below = *link;
    } else {
      *link = above;
      link = &above->left;
      above = *link;
    }
  }
  *link = below != nullptr ? below : above;
  if (roots_[bin] == nullptr) used_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
  --count_;
}

block* free_index::best_fit(std::size_t bytes) const noexcept {
  const std::size_t bin = bin_of(bytes);
  block* found = nullptr;
  for (block* at = roots_[bin]; at != nullptr;) {
    if (at->run_bytes >= bytes) {
      found = at;
      at = at->left;
    } else {
      at = at->right;
    }
  }
  if (found != nullptr) return found;
  const std::size_t next = next_used(bin + 1);
  if (next == bins) return nullptr;
  found = roots_[next];
  while (found->left != nullptr) found = found->left;
  return found;
}

}  // namespace evmm
