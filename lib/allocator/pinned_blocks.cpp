// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pinned_blocks.hpp"

#include <iterator>
#include <utility>

namespace evmm::pinned {

namespace {

/// A block serves requests down to this part of it: a small block that lives long would keep a
/// large segment from being given back.
constexpr std::size_t k_ratio = 4;
constexpr std::size_t k_always = std::size_t{1} << 20;  ///< up to here a block serves any request

bool serves(std::size_t block_bytes, std::size_t bytes) {
  return block_bytes <= k_always || block_bytes / k_ratio <= bytes;
}

block::free_set::node_type make_slot() {
  block::free_set one;
  return one.extract(one.emplace(0, 0).first);
}

}  // namespace

void block_table::enter(block& which) noexcept {
  which.slot.value() = {which.bytes, which.at};
  set_of(which).insert(std::move(which.slot));
  free_bytes_ += which.bytes;
}

void block_table::leave(block& which) noexcept {
  which.slot = set_of(which).extract({which.bytes, which.at});
  free_bytes_ -= which.bytes;
}

block* block_table::take(std::size_t bytes, bool any) {
  return take_from(free_, bytes, any);
}

block* block_table::take_reserved(std::size_t bytes) {
  return take_from(reserved_free_, bytes, true);
}

block* block_table::take_from(block::free_set& from, std::size_t bytes, bool any) {
  const auto best = from.lower_bound({bytes, 0});
  if (best == from.end() || !(any || serves(best->first, bytes))) return nullptr;
  block& found = blocks_.find(best->second)->second;
  if (found.bytes > bytes) {
    cut(found, bytes);
  } else {
    leave(found);
  }
  found.use = block_use::live;
  return &found;
}

void block_table::cut(block& which, std::size_t bytes) {
  block rest{.at = which.at + bytes,
             .bytes = which.bytes - bytes,
             .in = which.in,
             .use = block_use::free,
             .slot = make_slot()};
  const auto entry = blocks_.emplace_hint(blocks_.upper_bound(which.at), rest.at, std::move(rest));
  if (which.use == block_use::free) leave(which);
  which.bytes = bytes;
  enter(entry->second);
}

block* block_table::add(const segment& piece) {
  const auto entry = segments_.emplace(piece.base, piece).first;
  try {
    block made{.at = piece.base, .bytes = piece.bytes, .in = &entry->second, .slot = make_slot()};
    block& added = blocks_.emplace(piece.base, std::move(made)).first->second;
    reserve_ = reserve_ || piece.reserve;
    return &added;
  } catch (...) {
    segments_.erase(entry);
    throw;
  }
}

block& block_table::give(block& freed) noexcept {
  freed.use = block_use::free;
  freed.requested = 0;
  freed.streams.clear();
  freed.marks = 0;
  auto entry = blocks_.find(freed.at);
  const auto joins = [&](const block& other) {
    return other.use == block_use::free && other.in == freed.in;
  };
  if (const auto next = std::next(entry); next != blocks_.end() && joins(next->second)) {
    leave(next->second);
    entry->second.bytes += next->second.bytes;
    blocks_.erase(next);
  }
  if (entry != blocks_.begin() && joins(std::prev(entry)->second)) {
    const auto before = std::prev(entry);
    leave(before->second);
    before->second.bytes += entry->second.bytes;
    blocks_.erase(entry);
    entry = before;
  }
  enter(entry->second);
  return entry->second;
}

block* block_table::find(address at) noexcept {
  return const_cast<block*>(std::as_const(*this).find(at));
}

const block* block_table::find(address at) const noexcept {
  const auto next = blocks_.upper_bound(at);
  if (next == blocks_.begin()) return nullptr;
  const block& found = std::prev(next)->second;
  return at - found.at < found.bytes ? &found : nullptr;
}

std::optional<block_table::taken> block_table::take_out(address from, std::size_t above) noexcept {
  for (auto piece = segments_.lower_bound(from); piece != segments_.end(); ++piece) {
    if (piece->second.reserve || piece->second.bytes <= above) continue;
    const auto first = blocks_.find(piece->first);
    if (first->second.use != block_use::free || !first->second.whole()) continue;
    leave(first->second);
    taken out;
    out.whole = blocks_.extract(first);
    out.piece = segments_.extract(piece);
    return out;
  }
  return std::nullopt;
}

void block_table::put_back(taken which) noexcept {
  const auto piece = segments_.insert(std::move(which.piece)).position;
  which.whole.mapped().in = &piece->second;
  enter(blocks_.insert(std::move(which.whole)).position->second);
}

std::optional<segment> block_table::remove_any() noexcept {
  if (segments_.empty()) return std::nullopt;
  const segment out = segments_.begin()->second;
  for (auto each = blocks_.lower_bound(out.base);
       each != blocks_.end() && each->first - out.base < out.bytes;) {
    if (each->second.use == block_use::free) leave(each->second);
    each = blocks_.erase(each);
  }
  segments_.erase(segments_.begin());
  return out;
}

}  // namespace evmm::pinned
