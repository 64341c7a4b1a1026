// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/arena.hpp"

#include <algorithm>
#include <bit>

namespace evmm {

namespace {
/// Small requests merge what was freed only when nothing fits, or when this many have gathered:
/// they are many, and what they waste is little.
constexpr std::size_t most_recent_small = 512;
constexpr std::size_t records_at_once = 32;
}  // namespace

arena::arena(pool_record& pool, native_stream stream, size_class kind, ledger_account& account,
             const size_rules& rules, const std::atomic<std::uint64_t>& clock)
    : account_(account), pool_(pool), stream_(stream), kind_(kind), rules_(rules), clock_(clock) {}

// --- records -----------------------------------------------------------------------------------

void arena::reserve(std::size_t more) {
  table_.reserve(more);
  while (spare_count_ < more) {
    records_.push_back(std::make_unique<block[]>(records_at_once));
    for (std::size_t i = 0; i < records_at_once; ++i) {
      block& made = records_.back()[i];
      made.owner = this;
      drop_record(&made);
    }
  }
}

block* arena::new_record() noexcept {
  block* const made = spare_;
  spare_ = made->left;
  --spare_count_;
  return made;
}

void arena::drop_record(block* gone) noexcept {
  gone->use = block_use::none;
  gone->at = 0;
  gone->left = spare_;
  gone->before = gone->after = gone->right = nullptr;
  spare_ = gone;
  ++spare_count_;
}

block* arena::cut(block* whole, std::size_t bytes) noexcept {
  block* const rest = new_record();
  rest->at = whole->at + bytes;
  rest->bytes = whole->bytes - bytes;
  rest->requested = 0;
  rest->in = whole->in;
  rest->use = whole->use;
  rest->freed_at = whole->freed_at;
  rest->before = whole;
  rest->after = whole->after;
  if (rest->after != nullptr) rest->after->before = rest;
  whole->after = rest;
  whole->bytes = bytes;
  table_.insert(rest);
  return rest;
}

void arena::join(block* first, block* next) noexcept {
  first->bytes += next->bytes;
  first->freed_at = std::max(first->freed_at, next->freed_at);
  first->after = next->after;
  if (first->after != nullptr) first->after->before = first;
  table_.erase(next->at);
  drop_record(next);
}

// --- free blocks and holes ---------------------------------------------------------------------

void arena::insert_free(block* freed) noexcept {
  freed->use = block_use::free;
  if (block* const next = freed->after; next != nullptr && next->use == block_use::free) {
    free_.erase(next);
    join(freed, next);
  }
  if (block* const last = freed->before; last != nullptr && last->use == block_use::free) {
    free_.erase(last);
    join(last, freed);
    freed = last;
  }
  free_.insert(freed);
}

void arena::insert_hole(block* empty) noexcept {
  empty->use = block_use::hole;
  if (block* const next = empty->after; next != nullptr && next->use == block_use::hole) {
    erase_hole(next);
    join(empty, next);
  }
  if (block* const last = empty->before; last != nullptr && last->use == block_use::hole) {
    join(last, empty);  // is in the list already
    return;
  }
  empty->left = nullptr;
  empty->right = holes_;
  if (holes_ != nullptr) holes_->left = empty;
  holes_ = empty;
}

void arena::erase_hole(block* filled) noexcept {
  (filled->left != nullptr ? filled->left->right : holes_) = filled->right;
  if (filled->right != nullptr) filled->right->left = filled->left;
}

void arena::merge(recent_list& list) noexcept {
  while (list.head != nullptr) {
    block* const freed = list.head;
    list.head = freed->left;
    --recent_count_;
    insert_free(freed);
  }
}

void arena::merge_recent() noexcept {
  for (; recent_used_ != 0; recent_used_ &= recent_used_ - 1) {
    merge(recent_[static_cast<std::size_t>(std::countr_zero(recent_used_))]);
  }
}

// --- requests ----------------------------------------------------------------------------------

block* arena::take_free(std::size_t bytes, bool whole) {
  reserve(1);
  block* found = nullptr;
  if (kind_ == size_class::small && recent_count_ < most_recent_small) {
    found = free_.best_fit(bytes);
  }
  if (found == nullptr) {
    merge_recent();
    found = free_.best_fit(bytes);
  }
  if (found == nullptr || found->bytes > rules_.largest_fit(bytes, found->in->expandable())) {
    return nullptr;
  }
  free_.erase(found);
  if (!whole && rules_.splits(kind_, found->bytes, bytes, found->in->expandable())) {
    block* const rest = cut(found, bytes);
    rest->use = block_use::free;
    free_.insert(rest);
  }
  found->use = block_use::allocated;
  return found;
}

block* arena::take_at(address at, std::size_t bytes) {
  reserve(2);
  merge_recent();
  block* found = nullptr;
  free_.for_each(bytes, [&](block* free) {
    if (at >= free->at && at + bytes <= free->at + free->bytes) found = free;
  });
  if (found == nullptr) return nullptr;
  free_.erase(found);
  if (at > found->at) {
    block* const middle = cut(found, at - found->at);
    free_.insert(found);
    found = middle;
  }
  if (rules_.splits(kind_, found->bytes, bytes, found->in->expandable())) {
    block* const rest = cut(found, bytes);
    rest->use = block_use::free;
    free_.insert(rest);
  }
  found->use = block_use::allocated;
  return found;
}

// --- memory ------------------------------------------------------------------------------------

void arena::add(segment_record& segment, block_use as) noexcept {
  block* const all = new_record();
  all->at = segment.base;
  all->bytes = segment.bytes;
  all->requested = 0;
  all->in = &segment;
  all->freed_at = now();
  all->before = all->after = nullptr;
  segment.first = all;
  table_.insert(all);
  if (as == block_use::hole) {
    insert_hole(all);
  } else {
    insert_free(all);
  }
}

void arena::remove(segment_record& segment) noexcept {
  block* const all = segment.first;
  if (all->use == block_use::hole) {
    erase_hole(all);
  } else {
    free_.erase(all);
  }
  table_.erase(all->at);
  drop_record(all);
  segment.first = nullptr;
}

void arena::back(block* hole, address at, std::size_t bytes) noexcept {
  erase_hole(hole);
  block* filled = hole;
  if (at > hole->at) {
    filled = cut(hole, at - hole->at);
    filled->use = block_use::allocated;  // whatever keeps the rest of the hole from joining it
    insert_hole(hole);
  }
  if (filled->bytes > bytes) {
    block* const rest = cut(filled, bytes);
    filled->use = block_use::allocated;
    rest->use = block_use::hole;
    insert_hole(rest);
  }
  filled->freed_at = now();
  insert_free(filled);
}

block* arena::strip(block* free, address at, std::size_t bytes) noexcept {
  free_.erase(free);
  block* empty = free;
  if (at > free->at) {
    empty = cut(free, at - free->at);
    free_.insert(free);
  }
  if (empty->bytes > bytes) {
    block* const rest = cut(empty, bytes);
    rest->use = block_use::free;
    free_.insert(rest);
  }
  block* const before = empty->before;
  const bool joins = before != nullptr && before->use == block_use::hole;
  insert_hole(empty);
  return joins ? before : empty;
}

}  // namespace evmm
