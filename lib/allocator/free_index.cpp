// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/free_index.hpp"

#include <algorithm>

namespace evmm {

// A bound may be too high for a while: what leaves a tree does not lower those above it.

void free_index::plant(block* added) noexcept {
  const std::size_t bin = added->bin;
  block** link = &roots_[bin];
  const std::uint64_t own = priority(added);
  while (*link != nullptr && priority(*link) >= own) {
    block* const above = *link;
    above->most_free = std::max(above->most_free, added->run_free);
    link = less(added, above) ? &above->left : &above->right;
  }
  // Split what was here into those above and those below.
  block* rest = *link;
  added->most_free = std::max(added->run_free, rest != nullptr ? rest->most_free : 0);
  *link = added;
  block** ends[2] = {&added->right, &added->left};
  while (rest != nullptr) {
    block**& end = ends[less(rest, added)];
    *end = rest;
    end = less(rest, added) ? &rest->right : &rest->left;
    rest = *end;
  }
  *ends[0] = *ends[1] = nullptr;
  found_ = nullptr;
  used_[bin / 64] |= std::uint64_t{1} << (bin % 64);
}

void free_index::uproot(block* gone) noexcept {
  const std::size_t bin = gone->bin;
  block** link = &roots_[bin];
  if (found_ != nullptr && *found_ == gone) link = found_;
  while (*link != gone) link = less(gone, *link) ? &(*link)->left : &(*link)->right;
  found_ = nullptr;
  block* below = gone->left;
  block* above = gone->right;
  while (below != nullptr && above != nullptr) {
    const bool low = priority(below) > priority(above);
    block* const next = low ? below : above;
    next->most_free = std::max(below->most_free, above->most_free);
    *link = next;
    link = low ? &next->right : &next->left;
    (low ? below : above) = *link;
  }
  *link = below != nullptr ? below : above;
  if (roots_[bin] == nullptr) used_[bin / 64] &= ~(std::uint64_t{1} << (bin % 64));
}

block** free_index::first_with(block** root, std::size_t bytes) noexcept {
  const auto bound = [](const block* of) { return of != nullptr ? of->most_free : 0; };
  block** link = root;
  while (bound(*link) >= bytes) {
    block* const here = *link;
    if (bound(here->left) >= bytes) {
      link = &here->left;
    } else if (here->run_free >= bytes) {
      return link;
    } else if (bound(here->right) >= bytes) {
      link = &here->right;
    } else {
      here->most_free = std::max({here->run_free, bound(here->left), bound(here->right)});
      link = root;
    }
  }
  return nullptr;
}

block* free_index::best_fit(std::size_t bytes) noexcept {
  block* best = last_ != nullptr && last_->run_free >= bytes ? last_ : nullptr;
  visit_bins(bin_of(bytes), [&](std::size_t bin) {
    if (best != nullptr && bin > best->bin) return true;
    if (roots_[bin]->most_free < bytes) return false;
    block** const link = first_with(&roots_[bin], bytes);
    if (link == nullptr) return false;
    found_ = link;
    if (best == nullptr || less(*link, best)) best = *link;
    return true;
  });
  return best;
}

bool free_index::sound() const noexcept {
  const auto sound_below = [](const auto& self, const block* root) -> bool {
    if (root == nullptr) return true;
    for (const block* child : {root->left, root->right}) {
      if (child == nullptr) continue;
      if (less(child, root) != (child == root->left)) return false;
      if (child->most_free > root->most_free || priority(child) > priority(root)) return false;
      if (!self(self, child)) return false;
    }
    return root->run_free <= root->most_free;
  };
  return std::all_of(roots_.begin(), roots_.end(),
                     [&](const block* root) { return sound_below(sound_below, root); });
}

}  // namespace evmm
