// SPDX-License-Identifier: Apache-2.0
// Which free memory a request may take, and where it fits best.
#include "lib/allocator/supply_search.hpp"

#include <algorithm>
#include <limits>
#include <utility>

namespace evmm {

namespace {
/// What it costs to wait for the work that still uses a mapping: more than any new memory.
constexpr std::size_t stall_cost = std::size_t{1} << 44;
}  // namespace

/// Whether `giver` may give memory that is free; it is locked then until the search ends.
memory_supply::giving memory_supply::ask(search& in, arena& giver) {
  const auto known = std::find_if(in.asked.begin(), in.asked.end(),
                                  [&](const auto& one) { return one.first == &giver; });
  if (known != in.asked.end()) return known->second;
  const auto answer = [&] {
    if (options_.now().recycle == recycling::never || !giver.pool().may_give()) {
      return giving::nothing;
    }
    std::unique_lock<spin_lock> held;
    if (!in.has_locked(giver.guard())) held = std::unique_lock(giver.guard());
    if (giver.free_bytes() == 0 && giver.recent_count() == 0) return giving::nothing;
    giving found = giving::at_once;
    // Work on the same stream is ordered already, unless a graph takes it out of its order. The
    // stream is asked with the arena locked: what is free now was used by nothing enqueued later.
    const bool capturing = in.needy.pool().captures > 0 ||
                           on_->capture(in.needy.stream()).status != capture_status::none;
    if (giver.stream() != in.needy.stream() || capturing) {
      if (on_->capture(giver.stream()).status != capture_status::none) return giving::nothing;
      if (!on_->idle(giver.stream())) {
        if (!in.may_wait || capturing) return giving::nothing;
        found = giving::after_wait;
      }
    }
    if (held) in.locks.push_back(std::move(held));
    return found;
  }();
  in.asked.emplace_back(&giver, answer);
  return answer;
}

/// Whether no live block touches the handle and its arena may give it.
bool memory_supply::takable(search& in, handle_record& what) {
  if (what.giver != nullptr) return true;
  arena& giver = *what.home->in.segment.owner;
  const auto answer = ask(in, giver);
  if (answer == giving::nothing) return false;
  const block* const around = giver.covering(what.home->at(), what.home->near);
  what.home->near = around;
  if (around->use != block_use::free || what.home->end() > around->at + around->bytes) return false;
  in.takable.push_back(&what);
  what.giver = &giver;
  what.freed_at = around->freed_at;
  what.needs_wait = answer == giving::after_wait;
  return true;
}

/// Looks in a run of free addresses for the first place that needs no mapping.
bool memory_supply::find_claim(search& in, block* run) {
  expandable_range& range = *run->in->range;
  const address end = run->at + run->run_bytes;
  address from = run->at;
  for (address here = range.round_down(from); here < std::min(end, range.mapped_end());) {
    span_record* const span = range.span_at(here);
    if (span == nullptr) {
      here += granule_;
      from = here;
      continue;
    }
    // A handle serves one of its addresses at a time.
    const bool doubled =
        std::any_of(span->what.spans.begin(), span->what.spans.end(), [&](const auto& other) {
          return &other->in == &range && other->at() >= from && other->at() < here;
        });
    here = span->end();
    if (doubled || (!span->home() && !takable(in, span->what))) {
      from = here;
    } else if (here >= from + in.bytes && from + in.bytes <= end) {
      in.range = &range;
      in.at = from;
      in.run = run;
      return true;
    }
  }
  return false;
}

/// Adds what is free to what may be taken, best to take first.
void memory_supply::find_takable(search& in, std::span<arena* const> all, tier where) {
  for (arena* const giver : all) {
    if (giver->segments.empty() || !giver->pool().in_tier(where)) continue;
    const std::size_t locked = in.locks.size();
    const std::size_t before = in.takable.size();
    if (ask(in, *giver) == giving::nothing) continue;
    giver->merge_recent();
    giver->for_each_free(granule_, [&](block* free) {
      if (!free->in->expandable()) return;
      expandable_range& range = *free->in->range;
      const address end = free->at + free->bytes;
      for (address at = range.round_up(free->at); at + granule_ <= end;) {
        span_record* const span = range.span_at(at);
        span->near = free;
        if (span->what.where() == where) takable(in, span->what);
        at = span->end();
      }
    });
    // Who has nothing to give goes on meanwhile.
    if (in.takable.size() == before && in.locks.size() > locked) in.locks.pop_back();
  }
  std::sort(in.takable.begin(), in.takable.end(),
            [](const handle_record* a, const handle_record* b) {
              if (a->needs_wait != b->needs_wait) return b->needs_wait;
              if (a->bytes() != b->bytes()) return a->bytes() > b->bytes();
              if (a->freed_at != b->freed_at) return a->freed_at < b->freed_at;
              return a->home->at() > b->home->at();
            });
}

/// The place where the least must be mapped, in the tightest run among equals.
void memory_supply::choose_place(search& in, tier where) const {
  std::size_t least_cost = std::numeric_limits<std::size_t>::max();
  const auto consider = [&](expandable_range& range, address at, block* run) {
    std::size_t cost = 0;
    const address end = range.round_up(at + in.bytes);
    for (address here = range.round_down(at); here < end && cost < least_cost;) {
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
        if (what.giver == nullptr || home_inside) {
          cost += std::min(end, span->end()) - here + (in_use(*span) ? stall_cost : 0);
        }
      }
      here = span->end();
    }
    if (cost >= least_cost) return;
    least_cost = cost;
    in.range = &range;
    in.at = at;
    in.run = run;
  };
  in.needy.runs().visit_until(in.bytes, [&](block* first) {
    if (!first->in->expandable() || !first->in->range->takes(where)) return false;
    expandable_range& range = *first->in->range;
    const address end = first->at + first->run_bytes;
    for (const block* part = first; part != nullptr && part->vacant(); part = part->after) {
      if (part->at + in.bytes <= end) consider(range, part->at, first);
      const address part_end = part->at + part->bytes;
      if (part_end - first->at >= in.bytes && part_end != range.end()) {
        consider(range, part_end - in.bytes, first);
      }
    }
    // Where nothing was ever mapped no work can be in the way.
    const address fresh = std::max(range.mapped_end(), first->at);
    if (fresh + in.bytes <= end) consider(range, fresh, first);
    return least_cost == 0;
  });
}

}  // namespace evmm
