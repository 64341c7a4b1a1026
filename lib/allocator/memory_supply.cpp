// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/memory_supply.hpp"

#include "lib/memory/region_rules.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

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
}  // namespace

fixed_memory::~fixed_memory() {
  if (give_back_) log_failure("giving a pool's memory back to its user", give_back_);
}

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

memory_supply::memory_supply(std::shared_ptr<driver> on, device_id device,
                             const live_options& options, page_map& pages, listener tell)
    : on_(std::move(on)),
      device_(device),
      options_(options),
      pages_(pages),
      tell_(std::move(tell)),
      source_(*on_, {.device = device, .host = options.now().host, .share = options.now().share}),
      peers_(options.now().peers),
      access_(region_access(*on_, device, peers_, true)),
      granule_(on_->granularity(memory_location::on(device))) {}

memory_supply::~memory_supply() = default;

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

block* memory_supply::free_block_at(arena& in, block* hint, address at) const noexcept {
  const auto holds = [at](const block* b) { return at - b->at < b->bytes; };
  // The record may have become another block since.
  block* found = hint;
  if (found->use != block_use::free || !holds(found)) {
    found = nullptr;
    in.free_blocks().for_each(granule_, [&](block* free) {
      if (holds(free)) found = free;
    });
  }
  return found;
}

block* memory_supply::hole_at(arena& in, address at) const noexcept {
  block* hole = in.holes();
  while (at - hole->at >= hole->bytes) hole = hole->right;
  return hole;
}

// --- handles -----------------------------------------------------------------------------------

void memory_supply::count(pool_statistic& of, size_class kind, std::int64_t amount) noexcept {
  of.all.add(amount);
  (kind == size_class::small ? of.small_pool : of.large_pool).add(amount);
}

void memory_supply::hold(size_class kind, tier where, std::int64_t bytes) noexcept {
  count(segment_, kind, bytes > 0 ? 1 : -1);
  count(reserved_bytes_, kind, bytes);
  held_[static_cast<std::size_t>(where)] += static_cast<std::size_t>(bytes);
  ++(bytes > 0 ? made_ : released_);
}

handle_record* memory_supply::make(std::size_t bytes, tier where, size_class kind) {
  handles_.reserve(handles_.size() + 1);
  auto made = std::make_unique<handle_record>();
  try {
    if (where == tier::device) {
      made->memory = std::make_shared<physical_memory>(
          *on_, allocation_request{.bytes = bytes,
                                   .where = memory_location::on(device_),
                                   .share = options_.now().share});
    } else {
      made->memory = source_.acquire(where, bytes).take();
    }
  } catch (const out_of_memory&) {
    return nullptr;
  }
  made->serial = ++last_serial_;
  handles_.push_back(std::move(made));
  hold(kind, where, static_cast<std::int64_t>(bytes));
  return handles_.back().get();
}

span_record* memory_supply::map(handle_record& what, expandable_range& in, address at) {
  in.reserve(at + what.bytes());
  what.spans.reserve(what.spans.size() + 1);
  pages_.add(at, what.bytes(), &in.segment);
  const auto grants = access_(what.memory->location());
  auto made = std::make_unique<span_record>(what, in, mapping(*on_, at, *what.memory, grants));
  in.set(at, what.bytes(), made.get());
  what.spans.push_back(std::move(made));
  return what.spans.back().get();
}

bool memory_supply::in_use(span_record& stale) const {
  if (stale.last_use && on_->done(stale.last_use->get())) stale.last_use.reset();
  return stale.last_use.has_value();
}

void memory_supply::wait_for_last_use(span_record& stale) {
  if (!stale.last_use) return;
  on_->synchronize(stale.last_use->get());
  stale.last_use.reset();
}

void memory_supply::unmap(span_record& gone) noexcept {
  gone.in.set(gone.at(), gone.bytes(), nullptr);
  std::erase_if(gone.what.spans, [&](const auto& span) { return span.get() == &gone; });
}

void memory_supply::take_home(handle_record& taken, arena& needy) {
  arena& giver = *taken.giver;
  span_record& old = *taken.home;
  giver.reserve(2);
  if (!on_->idle(giver.stream())) {
    old.last_use.emplace(*on_, device_);
    on_->record(old.last_use->get(), giver.stream());
    if (taken.needs_wait) on_->wait(needy.stream(), old.last_use->get());
  }
  tell_(trace_action::segment_unmap, giver, old.at(), old.bytes());
  giver.strip(free_block_at(giver, taken.inside, old.at()), old.at(), old.bytes());
  taken.home = nullptr;
  taken.giver = nullptr;
  if (giver.kind() != needy.kind()) {
    const auto bytes = static_cast<std::int64_t>(taken.bytes());
    for (const auto& [kind, sign] : {std::pair{giver.kind(), -1}, std::pair{needy.kind(), 1}}) {
      (kind == size_class::small ? segment_.small_pool : segment_.large_pool).add(sign);
      (kind == size_class::small ? reserved_bytes_.small_pool : reserved_bytes_.large_pool)
          .add(sign * bytes);
    }
  }
}

void memory_supply::settle(search& in, span_record& home) {
  home.what.home = &home;
  home.last_use.reset();
  in.needy.back(hole_at(in.needy, home.at()), home.at(), home.bytes());
  tell_(trace_action::segment_map, in.needy, home.at(), home.bytes());
}

// --- expandable segments -----------------------------------------------------------------------

/// Grows with what is held, so that there are few handles where there is much memory, and shrinks
/// as handles have had to be moved, so that there is little waste where sizes do not repeat.
std::size_t memory_supply::new_handle_bytes(tier where) const noexcept {
  const allocator_options& options = options_.now();
  const double moved = static_cast<double>(recycled_) / static_cast<double>(made_ + 16);
  const double share = static_cast<double>(held_[static_cast<std::size_t>(where)]) /
                       (options.handle_fraction * (1 + 3 * moved));
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
      size = std::max(evmm::round_up(size / 8, granule_), options.min_handle);
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

// --- segments of one handle --------------------------------------------------------------------

bool memory_supply::add_segment(arena& needy, std::size_t bytes, const supply_terms& terms) {
  if (!terms.may_make) return false;
  fixed_.reserve(fixed_.size() + 1);
  needy.segments.reserve(needy.segments.size() + 1);
  needy.reserve(1);
  std::unique_ptr<fixed_memory> made;
  if (const auto& functions = needy.pool().options.functions) {
    void* const at = functions->allocate(bytes, device_, needy.stream());
    if (at == nullptr) return false;
    made = std::make_unique<fixed_memory>(
        reinterpret_cast<address>(at), bytes,
        [free = functions->free, at, bytes, device = device_] { free(at, bytes, device); });
  } else {
    bytes = evmm::round_up(bytes, granule_);
    if (held_[static_cast<std::size_t>(terms.where)] + bytes > terms.limit) return false;
    try {
      memory_ptr memory;
      if (terms.where == tier::device) {
        memory = std::make_shared<physical_memory>(
            *on_, allocation_request{.bytes = bytes,
                                     .where = memory_location::on(device_),
                                     .share = options_.now().share});
      } else {
        memory = source_.acquire(terms.where, bytes).take();
      }
      made = std::make_unique<fixed_memory>(*on_, std::move(memory), access_);
    } catch (const out_of_memory&) {
      return false;
    }
  }
  made->segment.owner = &needy;
  made->serial = ++last_serial_;
  pages_.add(made->segment.base, bytes, &made->segment);
  hold(needy.kind(), made->where(), static_cast<std::int64_t>(bytes));
  if (options_.now().max_split_size && bytes >= *options_.now().max_split_size)
    oversize_segments_.add(1);
  needy.add(made->segment, block_use::free);
  needy.segments.push_back(&made->segment);
  fixed_.push_back(std::move(made));
  tell_(trace_action::segment_alloc, needy, fixed_.back()->segment.base, bytes);
  return true;
}

// --- giving back -------------------------------------------------------------------------------

void memory_supply::release(handle_record& gone, arena& holder, address at) noexcept {
  for (const auto& span : gone.spans) {
    log_failure("waiting for the last use of a mapping", [&] { wait_for_last_use(*span); });
  }
  tell_(trace_action::segment_unmap, holder, at, gone.bytes());
  holder.strip(free_block_at(holder, gone.inside, at), at, gone.bytes());
  gone.home = nullptr;
  for (const auto& span : gone.spans) span->in.set(span->at(), span->bytes(), nullptr);
  hold(holder.kind(), gone.where(), -static_cast<std::int64_t>(gone.bytes()));
  std::erase_if(handles_, [&](const auto& handle) { return handle.get() == &gone; });
}

std::size_t memory_supply::releasable(arena& from) const {
  std::size_t bytes = 0;
  from.merge_recent();
  from.free_blocks().for_each(0, [&](block* free) {
    if (!free->in->expandable()) {
      if (from.unused(*free->in)) bytes += free->bytes;
      return;
    }
    const expandable_range& range = *free->in->range;
    const address end = free->at + free->bytes;
    for (address at = range.round_up(free->at); at + granule_ <= end;) {
      const span_record* const span = range.span_at(at);
      if (span->at() >= free->at && span->end() <= end) bytes += span->bytes();
      at = span->end();
    }
  });
  return bytes;
}

std::size_t memory_supply::give_back(arena& from, std::size_t wanted, std::uint64_t older_than) {
  if (!from.pool().may_give()) return 0;
  from.merge_recent();
  struct candidate {
    std::uint64_t freed_at;
    handle_record* handle;
    segment_record* segment;
  };
  std::vector<candidate> candidates;
  std::size_t splits = 0;
  from.free_blocks().for_each(0, [&](block* free) {
    if (free->freed_at >= older_than) return;
    if (!free->in->expandable()) {
      if (from.unused(*free->in)) candidates.push_back({free->freed_at, nullptr, free->in});
      return;
    }
    const expandable_range& range = *free->in->range;
    const address end = free->at + free->bytes;
    for (address at = range.round_up(free->at); at + granule_ <= end;) {
      span_record* const span = range.span_at(at);
      if (span->at() >= free->at && span->end() <= end) {
        span->what.inside = free;
        candidates.push_back({free->freed_at, &span->what, nullptr});
        splits += 2;
      }
      at = span->end();
    }
  });
  from.reserve(splits);
  std::stable_sort(candidates.begin(), candidates.end(), [](const auto& a, const auto& b) {
    if (a.freed_at != b.freed_at) return a.freed_at < b.freed_at;
    if (a.handle != nullptr && b.handle != nullptr)
      return a.handle->home->at() > b.handle->home->at();
    return false;
  });
  std::size_t given = 0;
  for (const candidate& chosen : candidates) {
    if (given >= wanted) break;
    if (chosen.handle != nullptr) {
      given += chosen.handle->bytes();
      release(*chosen.handle, from, chosen.handle->home->at());
      continue;
    }
    segment_record& segment = *chosen.segment;
    const std::size_t bytes = segment.bytes;
    tell_(trace_action::segment_free, from, segment.base, bytes);
    if (options_.now().max_split_size && bytes >= *options_.now().max_split_size)
      oversize_segments_.add(-1);
    from.remove(segment);
    std::erase(from.segments, &segment);
    pages_.remove(segment.base, bytes);
    hold(from.kind(), segment.memory->where(), -static_cast<std::int64_t>(bytes));
    std::erase_if(fixed_, [&](const auto& fixed) { return &fixed->segment == &segment; });
    given += bytes;
  }
  return given;
}

void memory_supply::drop(arena& gone) noexcept {
  for (segment_record* segment : gone.segments) {
    if (segment->expandable()) {
      expandable_range& range = *segment->range;
      std::erase_if(handles_, [&](const auto& handle) {
        std::erase_if(handle->spans, [&](const auto& span) {
          if (&span->in != &range || span->home()) return false;
          log_failure("waiting for the last use of a mapping", [&] { wait_for_last_use(*span); });
          return true;
        });
        if (handle->home == nullptr || &handle->home->in != &range) return false;
        tell_(trace_action::segment_unmap, gone, handle->home->at(), handle->bytes());
        for (const auto& span : handle->spans) {
          log_failure("waiting for the last use of a mapping", [&] { wait_for_last_use(*span); });
          span->in.set(span->at(), span->bytes(), nullptr);
        }
        hold(gone.kind(), handle->where(), -static_cast<std::int64_t>(handle->bytes()));
        return true;
      });
      pages_.remove(range.base(), range.end() - range.base());
      std::erase_if(ranges_, [&](const auto& its) { return its.get() == &range; });
    } else {
      tell_(trace_action::segment_free, gone, segment->base, segment->bytes);
      pages_.remove(segment->base, segment->bytes);
      hold(gone.kind(), segment->memory->where(), -static_cast<std::int64_t>(segment->bytes));
      std::erase_if(fixed_, [&](const auto& fixed) { return &fixed->segment == segment; });
    }
  }
  gone.segments.clear();
}

void memory_supply::enable_peer(device_id peer) {
  if (std::find(peers_.begin(), peers_.end(), peer) != peers_.end()) return;
  std::vector<device_id> peers = peers_;
  peers.push_back(peer);
  access_rule access = region_access(*on_, device_, peers, true);
  const access_grant grant{memory_location::on(peer)};
  for (const auto& handle : handles_) {
    for (const auto& span : handle->spans) {
      on_->set_access(span->at(), span->bytes(), std::span(&grant, 1));
    }
  }
  for (const auto& fixed : fixed_) {
    if (fixed->memory()) {
      on_->set_access(fixed->segment.base, fixed->segment.bytes, std::span(&grant, 1));
    }
  }
  peers_ = std::move(peers);
  access_ = std::move(access);
}

// --- what is held ------------------------------------------------------------------------------

void memory_supply::fill(allocator_statistics& into) const {
  into.segment = segment_;
  into.reserved_bytes = reserved_bytes_;
  into.oversize_segments = oversize_segments_;
  into.num_device_alloc = made_;
  into.num_device_free = released_;
  into.handles_recycled = recycled_;
  into.handles_claimed = claimed_;
  into.host_tier_bytes = static_cast<std::int64_t>(held_bytes(tier::host));
  into.mapped_bytes = into.reserved_bytes.all.current;
}

void memory_supply::reset_peaks() noexcept {
  for (pool_statistic* one : {&segment_, &reserved_bytes_}) {
    for (statistic* part : {&one->all, &one->small_pool, &one->large_pool})
      part->peak = part->current;
  }
  oversize_segments_.peak = oversize_segments_.current;
}

void memory_supply::reset_totals() noexcept {
  for (pool_statistic* one : {&segment_, &reserved_bytes_}) {
    for (statistic* part : {&one->all, &one->small_pool, &one->large_pool}) {
      part->allocated = part->freed = 0;
    }
  }
  oversize_segments_.allocated = oversize_segments_.freed = 0;
  made_ = released_ = recycled_ = claimed_ = 0;
}

std::vector<expandable_size> memory_supply::sizes() const {
  std::vector<expandable_size> all;
  for (const auto& range : ranges_) {
    const arena& owner = *range->segment.owner;
    all.push_back({.stream = owner.stream(),
                   .large = owner.kind() == size_class::large,
                   .pool = owner.pool().id,
                   .mapped_bytes = range->backed_bytes(),
                   .reserved_bytes = range->segment.bytes});
  }
  return all;
}

}  // namespace evmm
