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
#include <utility>

namespace evmm {

fixed_memory::~fixed_memory() {
  if (give_back_) log_failure("giving a pool's memory back to its user", give_back_);
}

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

void memory_supply::hold_in_pool(const arena& of, std::int64_t bytes) noexcept {
  count(of.pool().reserved_bytes, of.kind(), bytes);
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
      room_ -= std::min(room_, bytes);
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

void memory_supply::leave(handle_record& taken, arena& needy) {
  arena& giver = *taken.giver;
  span_record& old = *taken.home;
  giver.reserve(2);
  if (!on_->idle(giver.stream())) {
    old.last_use.emplace(*on_, device_);
    on_->record(old.last_use->get(), giver.stream());
    if (taken.needs_wait) on_->wait(needy.stream(), old.last_use->get());
  }
  taken.giver = nullptr;
}

void memory_supply::arrive(span_record& home, arena& needy, const block* near) {
  needy.reserve(2);
  const auto bytes = static_cast<std::int64_t>(home.bytes());
  const span_record* const old = home.what.home;
  if (old == nullptr) {
    hold_in_pool(needy, bytes);
  } else {
    const arena& giver = *old->in.segment.owner;
    tell_(trace_action::segment_unmap, giver, old->at(), old->bytes());
    const auto change_class = [&](pool_statistic& of, std::int64_t amount) {
      if (giver.kind() == needy.kind()) return;
      const bool to_small = needy.kind() == size_class::small;
      (to_small ? of.large_pool : of.small_pool).add(-amount);
      (to_small ? of.small_pool : of.large_pool).add(amount);
    };
    change_class(segment_, 1);
    change_class(reserved_bytes_, bytes);
    if (&giver.pool() == &needy.pool()) {
      change_class(needy.pool().reserved_bytes, bytes);
    } else {
      hold_in_pool(giver, -bytes);
      hold_in_pool(needy, bytes);
    }
  }
  home.what.home = &home;
  home.last_use.reset();
  block* const hole = needy.covering(home.at(), near);
  needy.back(hole, home.at(), home.bytes());
  home.near = hole;
  home.what.stack = tell_(trace_action::segment_map, needy, home.at(), home.bytes());
}

// --- segments of one handle --------------------------------------------------------------------

void memory_supply::check_given(address at, std::size_t bytes, const pool_functions& by) const {
  const auto refuse = [&](const char* why) {
    throw invalid_argument(fmt::format("a pool's own `allocate` returned {} for {}, {}",
                                       format_address(at), format_bytes(bytes), why),
                           "return a multiple of 512 where nothing is in use");
  };
  if (at % 512 != 0) {
    by.free(reinterpret_cast<void*>(at), bytes, device_);
    refuse("no multiple of 512");
  }
  if (pages_.any_in(at, bytes)) refuse("some of which lies in memory that is held already");
}

bool memory_supply::add_segment(arena& needy, std::size_t bytes, const supply_terms& terms) {
  if (!terms.may_make) return false;
  fixed_.reserve(fixed_.size() + 1);
  needy.segments.reserve(needy.segments.size() + 1);
  needy.reserve(1);
  auto record = records_.take(needy);
  std::unique_ptr<fixed_memory> made;
  if (const auto& functions = needy.pool().options.functions) {
    void* const at = functions->allocate(bytes, device_, needy.stream());
    if (at == nullptr) return false;
    check_given(reinterpret_cast<address>(at), bytes, *functions);
    made = std::make_unique<fixed_memory>(
        std::move(record), reinterpret_cast<address>(at), bytes,
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
      made = std::make_unique<fixed_memory>(std::move(record), *on_, std::move(memory), access_);
    } catch (const out_of_memory&) {
      return false;
    }
  }
  made->serial = ++last_serial_;
  pages_.add(made->segment.base, bytes, &made->segment);
  hold(needy.kind(), made->where(), static_cast<std::int64_t>(bytes));
  hold_in_pool(needy, static_cast<std::int64_t>(bytes));
  const auto& split = options_.now().max_split_size;
  made->oversize = split && bytes >= *split;
  if (made->oversize) oversize_segments_.add(1);
  needy.add(made->segment, block_use::free);
  needy.segments.push_back(&made->segment);
  fixed_.push_back(std::move(made));
  fixed_memory& added = *fixed_.back();
  added.stack = tell_(trace_action::segment_alloc, needy, added.segment.base, bytes);
  return true;
}

// --- giving back -------------------------------------------------------------------------------

void memory_supply::release(handle_record& gone) noexcept {
  const arena& holder = *gone.home->in.segment.owner;
  tell_(trace_action::segment_unmap, holder, gone.home->at(), gone.bytes());
  for (const auto& span : gone.spans) {
    log_failure("waiting for the last use of a mapping", [&] { wait_for_last_use(*span); });
    span->in.set(span->at(), span->bytes(), nullptr);
  }
  hold(holder.kind(), gone.where(), -static_cast<std::int64_t>(gone.bytes()));
  hold_in_pool(holder, -static_cast<std::int64_t>(gone.bytes()));
  std::erase_if(handles_, [&](const auto& handle) { return handle.get() == &gone; });
}

void memory_supply::release(const arena& holder, fixed_memory& gone) noexcept {
  const segment_record& segment = gone.segment;
  tell_(trace_action::segment_free, holder, segment.base, segment.bytes);
  if (gone.oversize) oversize_segments_.add(-1);
  pages_.remove(segment.base, segment.bytes);
  hold(holder.kind(), gone.where(), -static_cast<std::int64_t>(segment.bytes));
  hold_in_pool(holder, -static_cast<std::int64_t>(segment.bytes));
  std::erase_if(fixed_, [&](const auto& fixed) { return fixed.get() == &gone; });
}

std::size_t memory_supply::releasable(arena& from) const {
  std::size_t bytes = 0;
  from.merge_recent();
  from.for_each_free(0, [&](block* free) {
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

std::size_t memory_supply::give_back(arena& from, std::size_t wanted, std::optional<tier> where,
                                     std::uint64_t older_than, bool may_wait) {
  if (!from.pool().may_give()) return 0;
  from.merge_recent();
  struct candidate {
    std::uint64_t freed_at;
    handle_record* handle;
    segment_record* segment;
  };
  std::vector<candidate> candidates;
  std::size_t splits = 0;
  from.for_each_free(0, [&](block* free) {
    if (free->freed_at >= older_than) return;
    if (!free->in->expandable()) {
      const bool meant = !where || free->in->memory->where() == *where;
      if (meant && from.unused(*free->in)) {
        candidates.push_back({free->freed_at, nullptr, free->in});
      }
      return;
    }
    const expandable_range& range = *free->in->range;
    const address end = free->at + free->bytes;
    for (address at = range.round_up(free->at); at + granule_ <= end;) {
      span_record* const span = range.span_at(at);
      const bool meant = !where || span->what.where() == *where;
      if (meant && span->at() >= free->at && span->end() <= end) {
        span->near = free;
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
      const auto busy = [&](const auto& span) { return !span->home() && in_use(*span); };
      if (!may_wait &&
          std::any_of(chosen.handle->spans.begin(), chosen.handle->spans.end(), busy)) {
        continue;
      }
      const span_record& home = *chosen.handle->home;
      given += home.bytes();
      from.strip(from.covering(home.at(), home.near), home.at(), home.bytes());
      release(*chosen.handle);
      continue;
    }
    segment_record& segment = *chosen.segment;
    const std::size_t bytes = segment.bytes;
    from.remove(segment);
    std::erase(from.segments, &segment);
    release(from, *segment.memory);
    given += bytes;
  }
  return given;
}

void memory_supply::give_back_made(arena& of, std::uint64_t serial) {
  of.merge_recent();
  std::vector<handle_record*> made;
  for (const auto& handle : handles_) {
    if (handle->serial > serial && handle->home->in.segment.owner == &of) {
      made.push_back(handle.get());
    }
  }
  of.reserve(2 * made.size());
  for (handle_record* each : made) {
    const span_record& home = *each->home;
    block* const around = of.covering(home.at(), home.near);
    if (around->use != block_use::free || home.end() > around->at + around->bytes) continue;
    of.strip(around, home.at(), home.bytes());
    release(*each);
  }
}

void memory_supply::drop_unused_ranges(arena& of) {
  for (std::size_t i = of.segments.size(); i-- > 0;) {
    segment_record& segment = *of.segments[i];
    const block& first = *segment.first;
    if (!segment.expandable() || first.use != block_use::hole || first.after != nullptr) continue;
    expandable_range& range = *segment.range;
    bool in_the_way = false;  // what is mapped here too, and lives elsewhere
    for (address at = range.base(); at < range.mapped_end(); at += granule_) {
      span_record* const span = range.span_at(at);
      in_the_way = in_the_way || (span != nullptr && in_use(*span));
    }
    if (in_the_way) continue;
    for (address at = range.base(); at < range.mapped_end(); at += granule_) {
      if (span_record* const span = range.span_at(at); span != nullptr) unmap(*span);
    }
    of.remove(segment);
    of.segments.erase(of.segments.begin() + static_cast<std::ptrdiff_t>(i));
    pages_.remove(range.base(), range.end() - range.base());
    std::erase_if(ranges_, [&](const auto& its) { return its.get() == &range; });
  }
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
        hold_in_pool(gone, -static_cast<std::int64_t>(handle->bytes()));
        return true;
      });
      pages_.remove(range.base(), range.end() - range.base());
      std::erase_if(ranges_, [&](const auto& its) { return its.get() == &range; });
    } else {
      release(gone, *segment->memory);
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
  segment_.reset_peaks();
  reserved_bytes_.reset_peaks();
  oversize_segments_.reset_peak();
}

void memory_supply::reset_totals() noexcept {
  segment_.reset_totals();
  reserved_bytes_.reset_totals();
  oversize_segments_.reset_totals();
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
