// SPDX-License-Identifier: Apache-2.0
// How a memory_supply puts memory behind addresses that expand: planned with arenas locked, carried
// out with none.
#include "lib/allocator/supply_search.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <utility>

namespace evmm {

namespace {
/// Mappings of one handle. More only cost page tables; fewer mean more calls to map again.
constexpr std::size_t most_spans = 8;
/// How much smaller handles are made for each time that all that is held has moved. With less,
/// traces of random sizes hold too much; with more, steady ones make too many handles.
constexpr double move_weight = 12;
/// Moves count little while hardly anything is held.
constexpr std::size_t first_bytes = std::size_t{32} << 20;
/// Beyond what was live, the part of the usual size that is made.
constexpr std::size_t piece_share = 8;
/// After so many ranges the next reserve half as many addresses, up to so many times: a process has
/// 128 TiB, and may have hundreds of streams.
constexpr std::size_t ranges_a_halving = 32, most_halvings = 6;
}  // namespace

/// What is to be done for a request with no arena locked. Memory that takes part is `kept`
/// meanwhile, and free again where it was unless it was put to use.
struct memory_supply::plan {
  struct step {
    address at = 0;
    std::size_t bytes = 0;
    handle_record* moved = nullptr;  ///< null: one is made,
    handle_record* freed = nullptr;  ///< in exchange for this one, unless null
    block* kept = nullptr;           ///< where the home of one or the other was
  };
  arena& needy;
  expandable_range* range = nullptr;
  address at = 0;  ///< the place of the request
  std::size_t bytes = 0;
  const block* run = nullptr;  ///< where that lies
  std::vector<step> steps = {};
  std::vector<block*> kept = {};

  explicit plan(arena& of) : needy(of) {}
  plan(const plan&) = delete;
  plan& operator=(const plan&) = delete;
  ~plan() {
    for (block* each : kept) {
      const std::lock_guard held(each->owner->guard());
      each->owner->vacate(each, block_use::free);
    }
  }
  /// What the driver is to make on top of what it gets back.
  std::size_t made_bytes() const noexcept {
    std::size_t bytes = 0;
    for (const step& one : steps) {
      if (one.moved == nullptr) bytes += one.bytes;
      if (one.freed != nullptr) bytes -= std::min(bytes, one.freed->bytes());
    }
    return bytes;
  }
  /// The arena of `free` is locked.
  block* keep(block* free, address from, std::size_t size) {
    kept.reserve(kept.size() + 1);
    free->owner->reserve(2);
    kept.push_back(free->owner->occupy(free, from, size, block_use::kept));
    return kept.back();
  }
  /// Its memory has gone elsewhere.
  void strip(block* left) noexcept {
    std::erase(kept, left);
    const std::lock_guard held(left->owner->guard());
    left->owner->vacate(left, block_use::hole);
  }
};

expandable_range& memory_supply::range_of(arena& needy, std::size_t bytes,
                                          std::size_t reserve_bytes, tier where) {
  if (bytes > reserve_bytes) {
    throw out_of_memory(
        fmt::format(
            "cannot allocate {}: an expandable segment of DEVICE {} reserves {} of addresses",
            format_bytes(bytes), device_.value, format_bytes(reserve_bytes)),
        "raise expandable_segments_reserve or expandable_segments_reserve_by_class; what is larger "
        "than the device needs a pool whose tiers include the host");
  }
  const std::size_t halvings = std::min(ranges_.size() / ranges_a_halving, most_halvings);
  reserve_bytes = std::max(bytes, reserve_bytes >> halvings);
  needy.reserve(1);
  needy.segments.reserve(needy.segments.size() + 1);
  ranges_.reserve(ranges_.size() + 1);
  std::unique_ptr<expandable_range> made;
  try {
    made = std::make_unique<expandable_range>(
        records_.take(needy), *on_, evmm::round_up(reserve_bytes, granule_), granule_, where);
  } catch (const driver_error& refused) {
    throw driver_error(fmt::format("cannot reserve {} of addresses for an expandable segment: {}",
                                   format_bytes(reserve_bytes), refused.message()),
                       "lower expandable_segments_reserve or expandable_segments_reserve_by_class",
                       refused.native_code());
  }
  needy.add(made->segment, block_use::hole);
  needy.segments.push_back(&made->segment);
  ranges_.push_back(std::move(made));
  return *ranges_.back();
}

handle_record* memory_supply::pick(search& in, std::size_t most) const {
  for (handle_record* handle : in.takable) {
    if (handle->giver != nullptr && handle->bytes() <= most && !in.wants(*handle->home)) {
      return handle;
    }
  }
  return nullptr;
}

/// The smallest free handle that is larger than `size` and past all use: what it frees may be made
/// anew in the size that is needed.
handle_record* memory_supply::pick_to_exchange(search& in, std::size_t size) const {
  const auto found =
      std::find_if(in.takable.rbegin(), in.takable.rend(), [&](const handle_record* handle) {
        return handle->giver != nullptr && !handle->needs_wait && handle->bytes() >= size &&
               !in.wants(*handle->home) && on_->idle(handle->giver->stream());
      });
  return found == in.takable.rend() ? nullptr : *found;
}

std::size_t memory_supply::least_handle_bytes() const noexcept {
  return evmm::round_up(options_.now().min_handle, granule_);
}

/// Grows with what is held, so that there are few handles where there is much memory, and shrinks
/// as memory has had to be moved, so that there is little waste where sizes do not repeat.
std::size_t memory_supply::new_handle_bytes(std::size_t held) const noexcept {
  const allocator_options& options = options_.now();
  const double moved = static_cast<double>(moved_bytes_) / static_cast<double>(held + first_bytes);
  const double share =
      static_cast<double>(held) / (options.handle_fraction * (1 + move_weight * moved));
  const std::size_t least = least_handle_bytes();
  const std::size_t most = std::max(least, evmm::round_up(options.max_handle, granule_));
  return std::clamp(std::bit_floor(static_cast<std::size_t>(share) | 1), least, most);
}

/// What fills [from, to); false when memory runs out first.
bool memory_supply::plan_stretch(search& in, address from, address to, const supply_terms& terms,
                                 plan& to_do) {
  const allocator_options& options = options_.now();
  const auto open = [&](address at) {
    const span_record* const span = in.range->span_at(at);
    return span == nullptr || (!span->home() && in.wants(*span));
  };
  for (address at = from; at < to;) {
    std::size_t held = held_[static_cast<std::size_t>(terms.where)];
    for (const plan::step& step : to_do.steps) {
      if (step.moved == nullptr) held += step.bytes;
      if (step.freed != nullptr) held -= step.freed->bytes();
    }
    // A handle may reach beyond the request, into addresses that nothing is mapped at.
    std::size_t room = to - at;
    while (room < options.max_handle && at + room < in.range->end() && open(at + room)) {
      room += granule_;
    }
    std::size_t size = new_handle_bytes(held);
    const bool wanted = held + size <= terms.make_up_to;
    // Where the program has needed no more than before, in small pieces: they move more easily.
    if (held >= terms.make_up_to && !terms.growing) {
      size = std::max(evmm::round_up(size / piece_share, granule_), least_handle_bytes());
    }
    if (!wanted) size = std::min(size, to - at);
    size = std::min(size, room);
    while (size > granule_ && held + size > terms.limit) size = evmm::round_up(size / 2, granule_);
    const bool may_make = terms.may_make && held + size <= terms.limit;
    const std::size_t most = std::min(room, std::max<std::size_t>(to - at, size));
    plan::step next{.at = at, .bytes = size};
    if (!may_make || !wanted) next.moved = pick(in, most);
    // Beyond what was ever live nothing is added while something can be had instead: a handle that
    // reaches further, or the room of one that is too large.
    if (next.moved == nullptr && !wanted) next.moved = pick(in, room);
    if (next.moved == nullptr && !wanted && may_make) next.freed = pick_to_exchange(in, size);
    if (next.moved == nullptr && !may_make) return false;
    if (handle_record* const taken = next.moved != nullptr ? next.moved : next.freed) {
      const span_record& home = *taken->home;
      arena& giver = *taken->giver;
      leave(*taken, in.needy);
      next.kept = to_do.keep(giver.covering(home.at(), home.near), home.at(), home.bytes());
    }
    if (next.moved != nullptr) next.bytes = next.moved->bytes();
    to_do.steps.push_back(next);
    at += next.bytes;
  }
  return true;
}

/// Chooses the place of a request and what serves it; false when memory runs out first.
bool memory_supply::plan_request(search& in, std::size_t reserve_bytes, std::span<arena* const> all,
                                 const supply_terms& terms, plan& to_do) {
  arena& needy = in.needy;
  find_takable(in, all, terms.where);
  needy.merge_recent();
  choose_place(in, terms.where);
  if (in.range == nullptr) {
    expandable_range& made = range_of(needy, in.bytes, reserve_bytes, terms.where);
    in.range = &made;
    in.at = made.base();
    in.run = made.segment.first;
  }
  to_do.range = in.range;
  to_do.at = in.at;
  to_do.bytes = in.bytes;
  to_do.run = in.run;
  expandable_range& range = *in.range;
  const address to = range.round_up(in.at + in.bytes);
  // What is mapped here already serves, if it can.
  for (address at = range.round_down(in.at); at < to;) {
    span_record* const span = range.span_at(at);
    at = span != nullptr ? span->end() : at + granule_;
    if (span != nullptr && !span->home() && span->what.giver != nullptr &&
        !in.wants(*span->what.home)) {
      claim(in, *span);
    }
  }
  for (block* part = needy.covering(in.at, in.run); part != nullptr && part->at < in.at + in.bytes;
       part = part->after) {
    if (part->use != block_use::free) continue;
    const address from = std::max(part->at, in.at);
    part = to_do.keep(part, from, std::min(part->at + part->bytes, in.at + in.bytes) - from);
  }
  const auto backed = [&](address at) {
    const span_record* const span = range.span_at(at);
    return span != nullptr && span->home();
  };
  for (address at = range.round_down(in.at); at < to; at += granule_) {
    if (backed(at)) continue;
    const address from = at;
    while (at < to && !backed(at)) at += granule_;
    if (!plan_stretch(in, from, at, terms, to_do)) return false;
  }
  return true;
}

/// What the device has free. Asking takes as long as making a handle, and others take memory as
/// well: an earlier answer holds for what is a small part of it.
std::size_t memory_supply::room_for(std::size_t bytes) {
  if (bytes > room_ / 8) room_ = on_->usage(memory_location::on(device_)).free_bytes;
  return room_;
}

/// Makes and maps, with no arena locked. False when the driver has no memory, for the handles or to
/// map them.
bool memory_supply::carry_out(plan& to_do, const supply_terms& terms) {
  arena& needy = to_do.needy;
  expandable_range& range = *to_do.range;
  // What is mapped here and could not serve makes room.
  for (address at = range.round_down(to_do.at); at < to_do.at + to_do.bytes;) {
    span_record* const span = range.span_at(at);
    at = span != nullptr ? span->end() : at + granule_;
    if (span == nullptr || span->home()) continue;
    wait_for_last_use(*span);
    unmap(*span);
  }
  for (const plan::step& step : to_do.steps) {
    if (step.freed != nullptr) {
      to_do.strip(step.kept);
      release(*step.freed);
    }
    handle_record* const handle =
        step.moved != nullptr ? step.moved : make(step.bytes, terms.where, needy.kind());
    if (handle == nullptr) return false;
    if (handle->spans.size() >= most_spans) {
      const auto stale = std::find_if(handle->spans.begin(), handle->spans.end(), [&](auto& span) {
        return !span->home() && (!span->last_use || on_->done(span->last_use->get()));
      });
      if (stale != handle->spans.end()) unmap(**stale);
    }
    span_record* made = nullptr;
    const auto undo = [&] {
      if (made != nullptr) unmap(*made);
      if (step.moved != nullptr) return;
      hold(needy.kind(), terms.where, -static_cast<std::int64_t>(step.bytes));
      handles_.pop_back();
    };
    try {
      made = map(*handle, range, step.at);
      const std::lock_guard held(needy.guard());
      to_do.kept.reserve(to_do.kept.size() + 1);
      needy.reserve(4);
      arrive(*made, needy, to_do.run);
      // Nobody else gets it before the rest has come.
      const address from = std::max(made->at(), to_do.at);
      const address to = std::min(made->end(), to_do.at + to_do.bytes);
      to_do.keep(needy.covering(from, made->near), from, to - from);
    } catch (const out_of_memory&) {
      undo();
      return false;
    } catch (...) {
      undo();
      throw;
    }
    if (step.moved != nullptr) {
      to_do.strip(step.kept);
      ++recycled_;
      moved_bytes_ += step.bytes;
    }
  }
  return true;
}

block* memory_supply::expand(arena& needy, std::size_t bytes, std::size_t reserve_bytes,
                             std::span<arena* const> all, supply_terms terms,
                             std::unique_lock<spin_lock>& held) {
  for (;;) {
    plan to_do(needy);
    bool whole = false;
    {
      const std::lock_guard mine(needy.guard());
      search in{.needy = needy,
                .bytes = bytes,
                .may_wait = terms.may_wait || options_.now().recycle == recycling::wait};
      whole = plan_request(in, reserve_bytes, all, terms, to_do);
    }
    if (!whole && (!terms.in_parts || to_do.steps.empty())) break;
    // What is made for a request that fails would be held for nothing, and nobody else have it.
    if (to_do.steps.size() > 1 && terms.where == tier::device && !terms.in_parts) {
      const std::size_t made = to_do.made_bytes();
      const std::size_t room = room_for(made);
      const std::size_t limit = held_bytes(tier::device) + room;
      if (made > room && limit < terms.limit) {
        terms.limit = limit;
        continue;
      }
    }
    if (!carry_out(to_do, terms)) {
      if (!std::exchange(terms.may_make, false)) break;
      continue;  // once more with what there is
    }
    if (!whole) break;
    held = std::unique_lock(needy.guard());
    for (block* part : std::exchange(to_do.kept, {})) needy.vacate(part, block_use::free);
    return needy.take_at(to_do.at, bytes, to_do.run);
  }
  return nullptr;
}

void memory_supply::claim(search& in, span_record& span) {
  handle_record& what = span.what;
  const span_record& old = *what.home;
  arena& giver = *what.giver;
  in.needy.reserve(4);  // it may be the giver too
  leave(what, in.needy);
  giver.strip(giver.covering(old.at(), old.near), old.at(), old.bytes());
  arrive(span, in.needy, in.run);
  ++claimed_;
}

block* memory_supply::claim(arena& needy, std::size_t bytes) {
  search in{.needy = needy, .bytes = bytes, .may_wait = false};
  needy.merge_recent();
  needy.runs().visit_until(
      bytes, [&](block* run) { return run->in->expandable() && find_claim(in, run); });
  if (in.range == nullptr) return nullptr;
  for (address at = in.range->round_down(in.at); at < in.at + bytes;) {
    span_record* const span = in.range->span_at(at);
    if (!span->home()) claim(in, *span);
    at = span->end();
  }
  return needy.take_at(in.at, bytes, in.run);
}

}  // namespace evmm
