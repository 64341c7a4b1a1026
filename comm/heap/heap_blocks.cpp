// SPDX-License-Identifier: Apache-2.0
#include "comm/heap/heap_blocks.hpp"

#include "lib/memory/segment_plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <stdexcept>

namespace evmm {

// --- memory --------------------------------------------------------------------------------------

std::size_t heap_blocks::segment_at(std::size_t offset) const noexcept {
  const auto found =
      std::upper_bound(segments_.begin(), segments_.end(), offset,
                       [](std::size_t at, const heap_segment& of) { return at < of.end(); });
  return static_cast<std::size_t>(found - segments_.begin());
}

void heap_blocks::set_segments(std::vector<heap_segment> segments) {
  segments_ = std::move(segments);
  free_.clear();
  free_bytes_ = 0;
  std::erase_if(blocks_, [](const auto& entry) { return !entry.second.live(); });
  std::size_t at = 0;
  for (auto next = blocks_.begin(); next != blocks_.end(); ++next) {
    insert_free(at, next->first);
    at = next->first + next->second.bytes;
  }
  insert_free(at, size());
}

void heap_blocks::insert_free(std::size_t from, std::size_t to) {
  while (from < to) {
    std::size_t index = segment_at(from);
    const place here{segments_[index].pool, segments_[index].kind};
    std::size_t end = segments_[index].end();
    while (end < to && ++index < segments_.size() &&
           place{segments_[index].pool, segments_[index].kind} == here) {
      end = segments_[index].end();
    }
    end = std::min(end, to);
    heap_block& made = blocks_.try_emplace(from).first->second;
    made.at = from;
    made.bytes = end - from;
    made.run_bytes = made.bytes;
    made.run_free = made.bytes;
    made.use = block_use::free;
    free_[here].insert(&made);
    free_bytes_ += made.bytes;
    from = end;
  }
}

void heap_blocks::erase_free(std::map<std::size_t, heap_block>::iterator gone) {
  const heap_segment& in = segments_[segment_at(gone->first)];
  free_.at({in.pool, in.kind}).erase(&gone->second);
  free_bytes_ -= gone->second.bytes;
  blocks_.erase(gone);
}

// --- requests ------------------------------------------------------------------------------------

const free_index* heap_blocks::index_of(pool_id pool, tier kind) const noexcept {
  const auto found = free_.find({pool, kind});
  return found == free_.end() ? nullptr : &found->second;
}

std::optional<std::size_t> heap_blocks::find(pool_id pool, tier kind, std::size_t bytes,
                                             std::size_t alignment) const {
  const free_index* const index = index_of(pool, kind);
  if (index == nullptr) return std::nullopt;
  std::optional<std::size_t> best;
  index->visit_until(bytes, [&](const block* free) {
    const std::size_t at = round_up(free->at, alignment);
    if (at + bytes <= free->at + free->bytes) best = at;
    return best.has_value();
  });
  return best;
}

std::optional<std::size_t> heap_blocks::find_spanning(pool_id pool, std::size_t bytes,
                                                      std::size_t alignment,
                                                      std::optional<tier> begins) const {
  std::optional<std::size_t> best;
  std::size_t least = 0;
  for (auto at = blocks_.begin(); at != blocks_.end();) {
    const auto belongs = [&](const auto& entry) {
      return !entry.second.live() && segments_[segment_at(entry.first)].pool == pool;
    };
    if (!belongs(*at)) {
      ++at;
      continue;
    }
    const std::size_t from = at->first;
    std::size_t to = from;
    for (; at != blocks_.end() && belongs(*at); ++at) to = at->first + at->second.bytes;
    const std::size_t run = to - from;
    if (round_up(from, alignment) + bytes > to || (best && run >= least)) continue;
    if (begins && segments_[segment_at(from)].kind != *begins) continue;
    best = round_up(from, alignment);
    least = run;
  }
  return best;
}

std::size_t heap_blocks::shortfall(pool_id pool, std::optional<tier> kind, std::size_t bytes,
                                   std::size_t alignment) const {
  std::size_t from = size();
  for (auto at = blocks_.rbegin(); at != blocks_.rend(); ++at) {
    const heap_segment& in = segments_[segment_at(at->first)];
    if (at->second.live() || in.pool != pool || (kind && in.kind != *kind)) break;
    from = at->first;
  }
  const std::size_t end = round_up(from, alignment) + bytes;
  return end - std::min(end, size());
}

heap_block& heap_blocks::take(std::size_t at, std::size_t bytes) {
  const std::size_t end = at + bytes;
  auto first = std::prev(blocks_.upper_bound(at));
  const std::size_t from = first->first;
  std::size_t to = from;
  while (to < end) {
    to += first->second.bytes;
    erase_free(first++);
  }
  insert_free(from, at);
  heap_block& taken = blocks_.try_emplace(at).first->second;
  taken.at = at;
  taken.bytes = bytes;
  taken.use = block_use::allocated;
  insert_free(end, to);
  return taken;
}

heap_block* heap_blocks::find_live(std::size_t at) {
  const auto found = blocks_.find(at);
  return found == blocks_.end() || !found->second.live() ? nullptr : &found->second;
}
const heap_block* heap_blocks::find_live(std::size_t at) const {
  return const_cast<heap_blocks*>(this)->find_live(at);
}

void heap_blocks::put(heap_block& freed) {
  std::size_t from = freed.at;
  std::size_t to = from + freed.bytes;
  const auto place_at = [&](std::size_t offset) {
    const heap_segment& in = segments_[segment_at(offset)];
    return place{in.pool, in.kind};
  };
  auto here = blocks_.erase(blocks_.find(from));
  if (here != blocks_.end() && !here->second.live() && place_at(to - 1) == place_at(to)) {
    to += here->second.bytes;
    erase_free(here++);
  }
  if (here != blocks_.begin()) {
    const auto before = std::prev(here);
    if (!before->second.live() && place_at(before->first) == place_at(from)) {
      from = before->first;
      erase_free(before);
    }
  }
  insert_free(from, to);
}

// --- what there is -------------------------------------------------------------------------------

bool heap_blocks::any_live(std::size_t from, std::size_t to) const {
  bool any = false;
  for_live(from, to, [&](const heap_block&) { any = true; });
  return any;
}

heap_blocks::free_space heap_blocks::free_in(std::optional<pool_id> pool,
                                             std::optional<tier> kind) const noexcept {
  free_space all;
  for (const auto& [offset, held] : blocks_) {
    if (held.live()) continue;
    const heap_segment& in = segments_[segment_at(offset)];
    if ((pool && in.pool != *pool) || (kind && in.kind != *kind)) continue;
    all.bytes += held.bytes;
    all.largest = std::max(all.largest, held.bytes);
  }
  return all;
}

void heap_blocks::check() const {
  const auto require = [](bool holds, const char* what, std::size_t at) {
    if (!holds) throw std::logic_error(fmt::format("heap: {} at offset {}", what, at));
  };
  std::size_t at = 0;
  std::size_t free_total = 0;
  std::map<place, std::size_t> counted;
  const heap_block* before = nullptr;
  for (const auto& [offset, held] : blocks_) {
    require(offset == at && held.at == at, "blocks leave a gap or overlap", at);
    require(held.bytes > 0 && held.bytes % granule == 0, "a block has an odd size", at);
    at += held.bytes;
    require(at <= size(), "a block lies beyond the segments", offset);
    if (!held.live()) {
      const heap_segment& in = segments_[segment_at(offset)];
      for (std::size_t s = segment_at(offset); s <= segment_at(at - 1); ++s) {
        require(segments_[s].pool == in.pool && segments_[s].kind == in.kind,
                "a free block reaches across a border", offset);
      }
      if (before != nullptr && !before->live()) {
        const heap_segment& other = segments_[segment_at(before->at)];
        require(other.pool != in.pool || other.kind != in.kind, "free neighbours are not merged",
                offset);
      }
      ++counted[{in.pool, in.kind}];
      free_total += held.bytes;
    }
    before = &held;
  }
  require(at == size(), "the blocks do not cover the segments", at);
  require(free_total == free_bytes_, "free bytes are miscounted", free_total);
  for (const auto& [where, index] : free_) {
    require(index.count() == counted[where], "an index misses a block", index.count());
  }
}

}  // namespace evmm
