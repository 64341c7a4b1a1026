// SPDX-License-Identifier: Apache-2.0
// How a memory_supply puts memory behind addresses that expand.
#include "lib/allocator/memory_supply.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <limits>
#include <utility>

namespace evmm {

namespace {
/// Mappings of one handle. More only cost page tables; fewer mean more calls to map again.
constexpr std::size_t most_spans = 8;
/// What a mapping that is there already costs beside one that must be made, in bytes of it.
constexpr std::size_t claim_cost = 64 << 10;
/// What it costs to wait for the work that still uses a mapping: more than any new memory.
constexpr std::size_t stall_cost = std::size_t{1} << 44;
/// How much smaller handles are made for each move that a handle has taken on average. With less,
/// traces of random sizes hold too much; with more, steady ones make too many handles.
constexpr double move_weight = 3;
/// Beyond what was live, the part of the usual size that is made.
constexpr std::size_t piece_share = 8;
}  // namespace

/// One request for memory: which arenas are locked, which handles are free, where it goes.
struct memory_supply::search {
  arena& needy;
  std::size_t bytes;
  const supply_terms& terms;
  std::vector<std::unique_lock<spin_lock>> locks = {};
  std::vector<handle_record*> takable = {};  ///< best to take first
  expandable_range* range = nullptr;
  address at = 0;

  ~search() {
    for (handle_record* handle : takable) {
      handle->giver = nullptr;
      handle->inside = nullptr;
    }
  }
  /// The two arenas of a stream share a lock.
  bool has_locked(const spin_lock& guard) const noexcept {
    return &guard == &needy.guard() ||
           std::any_of(locks.begin(), locks.end(),
                       [&](const auto& held) { return held.mutex() == &guard; });
  }
  bool wants(const span_record& span) const noexcept {
    return &span.in == range && span.at() < at + bytes && span.end() > at;
  }
};

// --- finding memory ----------------------------------------------------------------------------

void memory_supply::find_takable(search& in, std::span<arena* const> all) {
  if (options_.now().recycle == recycling::never) return;
  const bool may_wait = in.terms.may_wait || options_.now().recycle == recycling::wait;
  const bool capturing = in.needy.pool().captures > 0;
  for (arena* const giver : all) {
    if (!giver->pool().may_give() || !giver->pool().in_tier(in.terms.where)) continue;
    if (giver->segments.empty()) continue;
    std::unique_lock<spin_lock> held;
    if (!in.has_locked(giver->guard())) held = std::unique_lock(giver->guard());
    if (giver->free_blocks().empty() && giver->recent_count() == 0) continue;
    bool needs_wait = false;
    // Work on the same stream is ordered already, unless a graph takes it out of its order. The
    // stream is asked with the arena locked: what is free now was used by nothing enqueued later.
    if (giver->stream() != in.needy.stream() || capturing) {
      if (on_->capture(giver->stream()).status != capture_status::none) continue;
      needs_wait = !on_->idle(giver->stream());
      if (needs_wait && (!may_wait || capturing)) continue;
    }
    const std::size_t before = in.takable.size();
    giver->merge_recent();
    giver->free_blocks().for_each(granule_, [&](block* free) {
      if (!free->in->expandable()) return;
      expandable_range& range = *free->in->range;
      const address end = free->at + free->bytes;
      for (address at = range.round_up(free->at); at + granule_ <= end;) {
        span_record* const span = range.span_at(at);
        if (span->at() >= free->at && span->end() <= end && span->what.where() == in.terms.where) {
          span->what.giver = giver;
          span->what.inside = free;
          span->what.needs_wait = needs_wait;
          in.takable.push_back(&span->what);
        }
        at = span->end();
      }
    });
    // Who has nothing to give goes on meanwhile.
    if (held && in.takable.size() > before) in.locks.push_back(std::move(held));
  }
  std::sort(in.takable.begin(), in.takable.end(),
            [](const handle_record* a, const handle_record* b) {
              if (a->needs_wait != b->needs_wait) return b->needs_wait;
              if (a->bytes() != b->bytes()) return a->bytes() > b->bytes();
              if (a->inside->freed_at != b->inside->freed_at) {
                return a->inside->freed_at < b->inside->freed_at;
              }
              return a->home->at() > b->home->at();
            });
}

void memory_supply::choose_place(search& in) const {
  std::size_t least_cost = std::numeric_limits<std::size_t>::max();
  std::size_t least_run = least_cost;
  const auto is_free = [](const block* b) {
    return b != nullptr && (b->use == block_use::free || b->use == block_use::hole);
  };
  const auto consider = [&](expandable_range& range, address at, std::size_t run) {
    std::size_t cost = 0;
    const address end = range.round_up(at + in.bytes);
    for (address here = range.round_down(at); here < end;) {
      span_record* const span = range.span_at(here);
      if (span == nullptr) {
        cost += granule_;
        here += granule_;
        continue;
      }
      if (!span->home()) {
        const handle_record& what = span->what;
        const bool home_inside = &what.home->in == &range && what.home->at() < end &&
                                 what.home->end() > range.round_down(at);
        if (what.giver != nullptr && !home_inside) {
          cost += claim_cost;
        } else {
          cost += std::min(end, span->end()) - here + (in_use(*span) ? stall_cost : 0);
        }
      }
      here = span->end();
      if (cost > least_cost) return;
    }
    if (cost > least_cost || (cost == least_cost && run >= least_run)) return;
    least_cost = cost;
    least_run = run;
    in.range = &range;
    in.at = at;
  };
  for (block* hole = in.needy.holes(); hole != nullptr; hole = hole->right) {
    if (!hole->in->range->takes(in.terms.where)) continue;
    block* first = hole;
    bool leads = true;  // the first hole of its run of free neighbours speaks for the run
    while (is_free(first->before)) {
      first = first->before;
      leads = leads && first->use != block_use::hole;
    }
    if (!leads) continue;
    block* last = hole;
    while (is_free(last->after)) last = last->after;
    const address end = last->at + last->bytes;
    const std::size_t run = end - first->at;
    if (run < in.bytes) continue;
    expandable_range& range = *hole->in->range;
    for (const block* part = first;; part = part->after) {
      if (part->at + in.bytes <= end) consider(range, part->at, run);
      const address part_end = part->at + part->bytes;
      if (part_end - first->at >= in.bytes && part_end != range.end()) {
        consider(range, part_end - in.bytes, run);
      }
      if (part == last) break;
    }
    // Where nothing was ever mapped no work can be in the way.
    const address fresh = std::max(range.mapped_end(), first->at);
    if (fresh + in.bytes <= end) consider(range, fresh, run);
  }
}

expandable_range& memory_supply::range_of(arena& needy, std::size_t bytes,
                                          std::size_t reserve_bytes, tier where) {
  if (bytes > reserve_bytes) {
    throw out_of_memory(
        fmt::format(
            "cannot allocate {}: an expandable segment of DEVICE {} reserves {} of addresses",
            format_bytes(bytes), device_.value, format_bytes(reserve_bytes)),
        "raise expandable_segments_reserve or expandable_segments_reserve_by_class");
  }
  needy.reserve(1);
  needy.segments.reserve(needy.segments.size() + 1);
  ranges_.reserve(ranges_.size() + 1);
  auto made = std::make_unique<expandable_range>(*on_, evmm::round_up(reserve_bytes, granule_),
                                                 granule_, needy, where);
  needy.add(made->segment, block_use::hole);
  needy.segments.push_back(&made->segment);
  ranges_.push_back(std::move(made));
  return *ranges_.back();
}

// --- filling it ---------------------------------------------------------------------------------

handle_record* memory_supply::pick(search& in, std::size_t most) const {
  for (handle_record* handle : in.takable) {
    if (handle->giver != nullptr && handle->bytes() <= most && !in.wants(*handle->home)) {
      return handle;
    }
  }
  return nullptr;
}

/// Gives back one free handle that is larger than `size` and past all use, to make a smaller one.
void memory_supply::exchange(search& in, std::size_t size) {
  for (auto at = in.takable.rbegin(); at != in.takable.rend(); ++at) {  // the smallest first
    handle_record* const handle = *at;
    if (handle->giver == nullptr || handle->needs_wait || handle->bytes() < size ||
        in.wants(*handle->home)) {
      continue;
    }
    arena& giver = *handle->giver;
    if (!on_->idle(giver.stream())) continue;
    giver.reserve(2);
    release(*handle, giver, handle->home->at());
    in.takable.erase(std::next(at).base());
    return;
  }
}

block* memory_supply::hole_at(arena& in, address at) const noexcept {
  block* hole = in.holes();
  while (at - hole->at >= hole->bytes) hole = hole->right;
  return hole;
}

void memory_supply::settle(search& in, span_record& home) {
  home.what.home = &home;
  home.last_use.reset();
  in.needy.back(hole_at(in.needy, home.at()), home.at(), home.bytes());
  tell_(trace_action::segment_map, in.needy, home.at(), home.bytes());
}

/// Grows with what is held, so that there are few handles where there is much memory, and shrinks
/// as handles have had to be moved, so that there is little waste where sizes do not repeat.
std::size_t memory_supply::new_handle_bytes(tier where) const noexcept {
  const allocator_options& options = options_.now();
  const double moved = static_cast<double>(recycled_) / static_cast<double>(made_ + 16);
  const double share = static_cast<double>(held_[static_cast<std::size_t>(where)]) /
                       (options.handle_fraction * (1 + move_weight * moved));
  return std::clamp(std::bit_floor(static_cast<std::size_t>(share) | 1), options.min_handle,
                    options.max_handle);
}

bool memory_supply::fill_stretch(search& in, address from, address to) {
  const allocator_options& options = options_.now();
  const tier where = in.terms.where;
  std::size_t& held = held_[static_cast<std::size_t>(where)];
  for (address at = from; at < to;) {
    in.needy.reserve(4);  // it may be the giver too
    // A handle may reach beyond the request, into addresses that nothing is mapped at.
    std::size_t room = to - at;
    while (room < options.max_handle && at + room < in.range->end() &&
           in.range->span_at(at + room) == nullptr) {
      room += granule_;
    }
    std::size_t size = new_handle_bytes(where);
    const bool wanted = held + size <= in.terms.make_up_to;
    // Where the program has needed no more than before, in small pieces: they move more easily.
    if (held >= in.terms.make_up_to && !in.terms.growing) {
      size = std::max(evmm::round_up(size / piece_share, granule_), options.min_handle);
    }
    if (!wanted) size = std::min(size, to - at);
    size = std::min(size, room);
    while (size > granule_ && held + size > in.terms.limit)
      size = evmm::round_up(size / 2, granule_);
    const bool may_make = in.terms.may_make && held + size <= in.terms.limit;
    const std::size_t most = std::min(room, std::max<std::size_t>(to - at, size));
    handle_record* found = nullptr;
    bool fresh = false;
    if (!may_make || !wanted) found = pick(in, most);
    // Beyond what was ever live nothing is added while something can be had instead: a handle that
    // reaches further, or the room of one that is too large.
    if (found == nullptr && !wanted) found = pick(in, room);
    if (found == nullptr && !wanted && may_make) exchange(in, size);
    if (found == nullptr && may_make) {
      found = make(size, where, in.needy.kind());
      fresh = found != nullptr;
    }
    if (found == nullptr) found = pick(in, most);
    if (found == nullptr) return false;

    if (found->spans.size() >= most_spans) {
      const auto stale = std::find_if(found->spans.begin(), found->spans.end(), [&](auto& span) {
        return !span->home() && (!span->last_use || on_->done(span->last_use->get()));
      });
      if (stale != found->spans.end()) unmap(**stale);
    }
    span_record* made = nullptr;
    try {
      made = map(*found, *in.range, at);
      if (!fresh) {
        take_home(*found, in.needy);
        ++recycled_;
      }
    } catch (...) {
      if (made != nullptr) unmap(*made);
      if (fresh) {
        hold(in.needy.kind(), where, -static_cast<std::int64_t>(found->bytes()));
        handles_.pop_back();
      }
      throw;
    }
    settle(in, *made);
    at = made->end();
  }
  return true;
}

block* memory_supply::expand(arena& needy, std::size_t bytes, std::size_t reserve_bytes,
                             std::span<arena* const> all, const supply_terms& terms) {
  search in{needy, bytes, terms};
  find_takable(in, all);
  needy.merge_recent();
  choose_place(in);
  if (in.range == nullptr) {
    expandable_range& range = range_of(needy, bytes, reserve_bytes, terms.where);
    in.range = &range;
    in.at = range.base();
  }
  expandable_range& range = *in.range;
  const address from = range.round_down(in.at);
  const address to = range.round_up(in.at + bytes);
  // First what is mapped here already: it serves, or it makes room.
  for (address at = from; at < to;) {
    span_record* const span = range.span_at(at);
    if (span == nullptr) {
      at += granule_;
      continue;
    }
    at = span->end();
    if (span->home()) continue;
    handle_record& what = span->what;
    if (what.giver != nullptr && !in.wants(*what.home)) {
      needy.reserve(4);
      take_home(what, needy);
      settle(in, *span);
      ++claimed_;
    } else {
      wait_for_last_use(*span);
      unmap(*span);
    }
  }
  for (address at = from; at < to;) {
    if (const span_record* span = range.span_at(at); span != nullptr) {
      at = span->end();
      continue;
    }
    address end = at;
    while (end < to && range.span_at(end) == nullptr) end += granule_;
    if (!fill_stretch(in, at, end)) return nullptr;
    at = end;
  }
  return needy.take_at(in.at, bytes);
}

}  // namespace evmm
