// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/arena.hpp"

#include <algorithm>
#include <bit>
#include <cstdlib>
#include <utility>

namespace evmm {

namespace {
constexpr std::size_t records_at_once = 32;
}  // namespace

arena::arena(pool_record& pool, native_stream stream, size_class kind, ledger_account& account,
             const size_rules& rules, const std::atomic<std::uint64_t>& clock)
    : kind_(kind), account_(account), pool_(pool), stream_(stream), rules_(rules), clock_(clock) {}

// --- records -----------------------------------------------------------------------------------

void arena::make_room(std::size_t more) {
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

void arena::retire() noexcept {
  table_ = block_table();
  records_ = std::vector<std::unique_ptr<block[]>>();
  spare_ = nullptr;
  spare_count_ = 0;
  deferred.reset();
}

// --- runs of free blocks and holes -------------------------------------------------------------

std::size_t arena::largest_free(const block* run) noexcept {
  std::size_t largest = 0;
  for (const block* part = run; part != nullptr && part->vacant(); part = part->after) {
    if (part->use == block_use::free) largest = std::max(largest, part->bytes);
  }
  return largest;
}

void arena::insert_run(block* first, std::size_t bytes, std::size_t largest) noexcept {
  first->run_bytes = bytes;
  first->run_free = largest;
  runs_.insert(first);
}

void arena::memory_changed(block* part) noexcept {
  block* const first = first_of_run(part);
  runs_.erase(first);
  insert_run(first, first->run_bytes, largest_free(first));
}

block* arena::join_alike(block* one) noexcept {
  if (block* const next = one->after; next != nullptr && next->use == one->use) join(one, next);
  block* const last = one->before;
  if (last == nullptr || last->use != one->use) return one;
  join(last, one);
  return last;
}

void arena::vacate(block* freed, block_use as) noexcept {
  block* first = freed;
  std::size_t bytes = freed->bytes;
  std::size_t largest = 0;
  if (block* const next = freed->after; next != nullptr && next->vacant()) {
    runs_.erase(next);
    bytes += next->run_bytes;
    largest = next->run_free;
  }
  if (freed->before != nullptr && freed->before->vacant()) {
    first = first_of_run(freed->before);
    runs_.erase(first);
    bytes += first->run_bytes;
    largest = std::max(largest, first->run_free);
  }
  if (as == block_use::free) free_bytes_ += freed->bytes;
  freed->use = as;
  const block* const whole = join_alike(freed);
  if (as == block_use::free) largest = std::max(largest, whole->bytes);
  insert_run(first, bytes, largest);
}

block* arena::occupy(block* first, block* free, address at, std::size_t bytes,
                     block_use as) noexcept {
  const address end = first->at + first->run_bytes;
  runs_.erase(first);
  free_bytes_ -= bytes;
  if (at == first->at && end == free->at + free->bytes) {  // as most are: one block, cut in front
    if (free->bytes > bytes) {
      block* const rest = cut(free, bytes);
      insert_run(rest, rest->bytes, rest->bytes);
    }
    free->use = as;
    return free;
  }
  block* const taken = part_of(free, at, bytes);
  taken->use = as;
  if (taken != first) insert_run(first, at - first->at, largest_free(first));
  if (at + bytes < end) insert_run(taken->after, end - at - bytes, largest_free(taken->after));
  return taken;
}

block* arena::part_of(block* whole, address at, std::size_t bytes) noexcept {
  block* const part = at > whole->at ? cut(whole, at - whole->at) : whole;
  if (part->bytes > bytes) cut(part, bytes);
  return part;
}

void arena::merge(recent_list& list) noexcept {
  while (list.head != nullptr) {
    block* const freed = list.head;
    list.head = freed->left;
    --recent_count_;
    vacate(freed, block_use::free);
  }
}

void arena::merge_recent() noexcept {
  if (last_ != nullptr) {
    vacate(std::exchange(last_, nullptr), block_use::free);
    --recent_count_;
    return;
  }
  for (; recent_used_ != 0; recent_used_ &= recent_used_ - 1) {
    merge(recent_[static_cast<std::size_t>(std::countr_zero(recent_used_))]);
  }
}

// --- requests ----------------------------------------------------------------------------------

block* arena::take_free(std::size_t bytes, bool whole) {
  reserve(1);
  block* run = kind_ == size_class::small ? runs_.best_fit(bytes) : nullptr;
  if (run == nullptr) {
    merge_recent();
    run = runs_.best_fit(bytes);
  }
  if (run == nullptr) return nullptr;
  block* found = run;
  while (found->use != block_use::free || found->bytes < bytes) found = found->after;
  if (found->bytes > rules_.largest_fit(bytes, found->in->expandable())) {
    return nullptr;
  }
  if (whole || !rules_.splits(kind_, found->bytes, bytes, found->in->expandable())) {
    bytes = found->bytes;
  }
  return occupy(run, found, found->at, bytes, block_use::allocated);
}

block* arena::free_at(address at, std::size_t bytes, const block* near) {
  reserve(2);
  merge_recent();
  block* const found = covering(at, near);
  if (found == nullptr || found->use != block_use::free || at + bytes > found->at + found->bytes) {
    return nullptr;
  }
  return found;
}

block* arena::take_exactly(address at, std::size_t bytes) {
  block* const found = free_at(at, bytes, nullptr);
  return found == nullptr ? nullptr : occupy(found, at, bytes, block_use::allocated);
}

block* arena::take_at(address at, std::size_t bytes, const block* near) {
  block* const found = free_at(at, bytes, near);
  if (found == nullptr) return nullptr;
  const std::size_t rest = found->at + found->bytes - at;
  if (!rules_.splits(kind_, rest, bytes, found->in->expandable())) bytes = rest;
  return occupy(found, at, bytes, block_use::allocated);
}

block* arena::covering(address at, const block* near) const noexcept {
  const auto holds = [at](const segment_record* one) { return at - one->base < one->bytes; };
  const block* found = near;
  if (found == nullptr || found->use == block_use::none || !holds(found->in)) {
    const auto segment = std::find_if(segments.begin(), segments.end(), holds);
    if (segment == segments.end()) return nullptr;
    found = (*segment)->first;
  }
  while (at < found->at) found = found->before;
  while (at - found->at >= found->bytes) found = found->after;
  return const_cast<block*>(found);
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
  vacate(all, as);
}

void arena::remove(segment_record& segment) noexcept {
  block* const all = segment.first;
  runs_.erase(all);
  if (all->use == block_use::free) free_bytes_ -= all->bytes;
  table_.erase(all->at);
  drop_record(all);
  segment.first = nullptr;
}

// Neither changes which addresses are free, so runs stay as they are.

void arena::back(block* hole, address at, std::size_t bytes) noexcept {
  block* const filled = part_of(hole, at, bytes);
  filled->use = block_use::free;
  filled->freed_at = now();
  free_bytes_ += bytes;
  memory_changed(join_alike(filled));
}

void arena::strip(block* free, address at, std::size_t bytes) noexcept {
  block* const empty = part_of(free, at, bytes);
  empty->use = block_use::hole;
  free_bytes_ -= bytes;
  memory_changed(join_alike(empty));
}

}  // namespace evmm
