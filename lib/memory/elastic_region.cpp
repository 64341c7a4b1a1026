// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/copier.hpp"
#include "lib/memory/memory_source.hpp"
#include "lib/memory/observers.hpp"
#include "lib/memory/part.hpp"
#include "lib/memory/region_rules.hpp"
#include "lib/memory/remap.hpp"
#include "lib/support/log.hpp"

#include <evmm/address_range.hpp>
#include <evmm/elastic_region.hpp>
#include <evmm/error.hpp>

#include <algorithm>
#include <numeric>
#include <utility>

namespace evmm {

namespace {

/// A change that waits for its streams.
struct pending {
  change_kind kind;
  scoped_event ready;  ///< behind everything that must be over
  std::shared_ptr<bool> open;
  /// shrink: the segments to unmap, out of the part's list already.
  std::vector<std::unique_ptr<part_segment>> retired = {};
  /// migrate: the segment, and what will back it once the copy is done.
  part_segment* moving = nullptr;
  memory_lease next = {};
  std::unique_ptr<scratch_mapping> scratch = {};
};

}  // namespace

struct elastic_region::state {
  state(std::shared_ptr<driver> driver, const region_options& options)
      : on(std::move(driver)),
        limits(check_limits(*on, options.device, options.reserve, options.max_segments,
                            options.max_segment_bytes)),
        access(region_access(*on, options.device, options.peers, options.cpu_access)),
        source(*on, {.device = options.device,
                     .host = options.host,
                     .share = options.share,
                     .rdma = options.rdma,
                     .cache_limit = options.cache_limit}),
        device(options.device),
        range(*on, limits.reserved, limits.granularity),
        copies(*on, options.device, options.peers),
        own(range.base()) {}

  ~state() {
    if (!log_failure("completing the pending changes of a region", [this] { finish(); })) {
      copies.settle();
    }
  }

  grown grow(tier kind, std::size_t bytes);
  std::size_t shrink(std::size_t bytes, const uses& in_use);
  void migrate(std::size_t index, tier kind, const uses& in_use);
  std::shared_ptr<bool> shrink_later(std::size_t bytes, const uses& in_use);
  std::shared_ptr<bool> migrate_later(std::size_t index, tier kind, const uses& in_use);
  void discard(contents kept, const uses& in_use, std::size_t first, std::size_t count);
  void restore();
  std::size_t poll();
  void finish();

  void complete(pending& change);
  /// A segment that can be migrated to `kind`, or null when it is there already.
  part_segment* to_migrate(std::size_t index, tier kind);
  void unmap_retired(std::vector<std::unique_ptr<part_segment>>& retired, announced_change& change);
  /// Tells the observers that [offset, offset + bytes) is about to change.
  announced_change announce(change_kind kind, std::size_t offset, std::size_t bytes) {
    return {observers,
            {.kind = kind, .epoch = epoch, .offset = offset, .bytes = bytes},
            counts.rollbacks};
  }
  /// What every change ends with.
  void commit(announced_change& change, std::uint64_t& counter) noexcept;

  // In order of construction; destroyed in reverse, mappings before the range, all before `on`.
  std::shared_ptr<driver> on;
  segment_limits limits;
  access_rule access;
  memory_source source;
  device_id device;
  address_range range;
  copier copies;
  observer_list observers;
  part own;
  std::vector<pending> queue;
  std::uint64_t epoch = 0;
  region_statistics counts;  ///< only what cannot be computed when asked for
};

void elastic_region::state::commit(announced_change& change, std::uint64_t& counter) noexcept {
  ++counter;
  change.committed(++epoch);
  counts.peak_bytes =
      std::max(counts.peak_bytes, own.mapped_bytes(tier::device) + own.mapped_bytes(tier::host));
#ifdef EVMM_DEBUG_CHECKS
  own.check();
#endif
}

grown elastic_region::state::grow(tier kind, std::size_t bytes) {
  // The addresses of retiring segments are the next to be used.
  if (std::any_of(queue.begin(), queue.end(),
                  [](const pending& p) { return !p.retired.empty(); })) {
    finish();
  }
  const std::vector<std::size_t> sizes = plan_growth(limits, own.size(), own.count(), bytes);
  const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
  const std::size_t offset = own.size();
  if (sizes.size() > 1) source.check_capacity(kind, total);  // for one, acquire() does
  std::vector<memory_lease> leases;
  std::vector<std::unique_ptr<part_segment>> added;
  leases.reserve(sizes.size());
  leases.push_back(source.acquire(kind, sizes.front()));
  own.reserve(sizes.size());
  announced_change change = announce(change_kind::grow, offset, total);
  remap swap(*on, access);
  // Each handle is mapped before the next is made: a GPU clears the one while the CPU maps it.
  for (std::size_t i = 0, at = offset; i < sizes.size(); at += sizes[i++]) {
    if (i > 0) leases.push_back(source.acquire(kind, sizes[i]));
    const memory_ptr& memory = leases[i].get();
    added.push_back(own.make(at, sizes[i], memory->location()));
    swap.replace(added.back()->place, memory);
    swap.apply();
  }
  swap.commit();
  for (memory_lease& lease : leases) lease.take();
  own.push_all(std::move(added));
  commit(change, counts.grows);
  return {offset, total};
}

void elastic_region::state::unmap_retired(std::vector<std::unique_ptr<part_segment>>& retired,
                                          announced_change& change) {
  remap swap(*on, access);
  for (auto& gone : retired) swap.replace(gone->place, nullptr);
  swap.apply();
  for (memory_ptr& unused : swap.commit()) source.recycle(std::move(unused));
  for (auto& gone : retired) source.recycle(std::move(gone->backup));
  retired.clear();
  commit(change, counts.shrinks);
}

std::size_t elastic_region::state::shrink(std::size_t bytes, const uses& in_use) {
  finish();
  const std::size_t count = tail_segments_within(own.sizes(), bytes);
  if (count == 0) return 0;
  const std::size_t kept = own.offset_of(own.at(own.count() - count));
  const std::size_t dropped = own.size() - kept;
  announced_change change = announce(change_kind::shrink, kept, dropped);
  wait_for(*on, device, in_use);
  auto retired = own.pop(count);
  try {
    unmap_retired(retired, change);
  } catch (...) {
    own.push_all(std::move(retired));
    throw;
  }
  return dropped;
}

std::shared_ptr<bool> elastic_region::state::shrink_later(std::size_t bytes, const uses& in_use) {
  const std::size_t count = tail_segments_within(own.sizes(), bytes);
  if (count == 0) return nullptr;
  for (std::size_t i = own.count() - count; i < own.count(); ++i) {
    const part_segment* leaving = &own.at(i);
    if (std::any_of(queue.begin(), queue.end(),
                    [&](const pending& p) { return p.moving == leaving; })) {
      finish();
    }
  }
  queue.reserve(queue.size() + 1);
  auto open = std::make_shared<bool>(true);
  scoped_event ready = copies.after(in_use);
  queue.push_back({change_kind::shrink, std::move(ready), open, own.pop(count)});
  return open;
}

part_segment* elastic_region::state::to_migrate(std::size_t index, tier kind) {
  part_segment& moving = own.at(index);
  if (moving.discarded) {
    throw invalid_argument(
        "cannot migrate segment " + std::to_string(index) + ": its memory was discarded",
        "restore() first");
  }
  return moving.where.kind == kind ? nullptr : &moving;
}

void elastic_region::state::migrate(std::size_t index, tier kind, const uses& in_use) {
  finish();
  part_segment* const moving = to_migrate(index, kind);
  if (moving == nullptr) return;
  slot& place = moving->place;
  memory_lease next = source.acquire(kind, place.bytes);
  announced_change change = announce(change_kind::migrate, own.offset_of(*moving), place.bytes);
  wait_for(*on, device, in_use);
  {
    const scratch_mapping scratch(*on, *next.get(), access);
    copies.copy(scratch.base(), place.at, place.bytes);
  }
  remap swap(*on, access);
  swap.replace(place, next.get());
  swap.apply();
  moving->where = next.take()->location();
  for (memory_ptr& unused : swap.commit()) source.recycle(std::move(unused));
  commit(change, counts.migrations);
}

std::shared_ptr<bool> elastic_region::state::migrate_later(std::size_t index, tier kind,
                                                           const uses& in_use) {
  part_segment* const moving = to_migrate(index, kind);
  if (moving == nullptr) return nullptr;
  if (std::any_of(queue.begin(), queue.end(),
                  [&](const pending& p) { return p.moving == moving; })) {
    finish();
    return migrate_later(index, kind, in_use);
  }
  queue.reserve(queue.size() + 1);
  auto open = std::make_shared<bool>(true);
  memory_lease next = source.acquire(kind, moving->place.bytes);
  auto scratch = std::make_unique<scratch_mapping>(*on, *next.get(), access);
  scoped_event ready =
      copies.copy_after(scratch->base(), moving->place.at, moving->place.bytes, in_use);
  queue.push_back({change_kind::migrate,
                   std::move(ready),
                   open,
                   {},
                   moving,
                   std::move(next),
                   std::move(scratch)});
  return open;
}

void elastic_region::state::complete(pending& waiting) {
  if (waiting.kind == change_kind::shrink) {
    const std::size_t offset = own.offset_of(*waiting.retired.front());
    const part_segment& last = *waiting.retired.back();
    announced_change change =
        announce(change_kind::shrink, offset, own.offset_of(last) + last.place.bytes - offset);
    unmap_retired(waiting.retired, change);
  } else {
    slot& place = waiting.moving->place;
    announced_change change =
        announce(change_kind::migrate, own.offset_of(*waiting.moving), place.bytes);
    remap swap(*on, access);
    swap.replace(place, waiting.next.get());
    swap.apply();
    waiting.scratch.reset();
    waiting.moving->where = waiting.next.take()->location();
    for (memory_ptr& unused : swap.commit()) source.recycle(std::move(unused));
    commit(change, counts.migrations);
  }
  *waiting.open = false;
}

std::size_t elastic_region::state::poll() {
  for (auto at = queue.begin(); at != queue.end();) {
    if (!on->done(at->ready.get())) {
      ++at;
      continue;
    }
    complete(*at);
    at = queue.erase(at);
  }
  return queue.size();
}

void elastic_region::state::finish() {
  while (!queue.empty()) {
    on->synchronize(queue.front().ready.get());
    complete(queue.front());
    queue.erase(queue.begin());
  }
}

void elastic_region::state::discard(contents kept, const uses& in_use, std::size_t first,
                                    std::size_t count) {
  finish();
  const index_range range_of = clip(first, count, own.count());
  std::vector<part_segment*> leaving;
  for (std::size_t i = range_of.first; i < range_of.last; ++i) {
    if (!own.at(i).discarded) leaving.push_back(&own.at(i));
  }
  if (leaving.empty()) return;
  const std::size_t offset = own.offset_of(*leaving.front());
  const std::size_t end = own.offset_of(*leaving.back()) + leaving.back()->place.bytes;
  std::vector<memory_lease> backups(leaving.size());
  if (kept == contents::backup) {
    for (std::size_t i = 0; i < leaving.size(); ++i) {
      if (leaving[i]->where.kind == tier::device) {
        backups[i] = source.acquire(tier::host, leaving[i]->place.bytes);
      }
    }
  }
  std::vector<memory_ptr> memory;
  for (const part_segment* segment : leaving) memory.push_back(segment->place.memory);
  announced_change change = announce(change_kind::discard, offset, end - offset);
  wait_for(*on, device, in_use);
  for (std::size_t i = 0; i < leaving.size(); ++i) {
    if (!backups[i].get()) continue;
    const scratch_mapping scratch(*on, *backups[i].get(), access);
    copies.copy(scratch.base(), leaving[i]->place.at, leaving[i]->place.bytes);
  }
  remap swap(*on, access);
  for (part_segment* segment : leaving) swap.replace(segment->place, nullptr);
  swap.apply();
  swap.commit();
  for (std::size_t i = 0; i < leaving.size(); ++i) {
    leaving[i]->discarded = true;
    // Host memory is its own backup: nothing is won by copying it to other host memory.
    if (kept == contents::backup) {
      leaving[i]->backup = backups[i].get() ? backups[i].take() : std::move(memory[i]);
    }
    source.release(std::move(memory[i]));
  }
  commit(change, counts.discards);
}

void elastic_region::state::restore() {
  finish();
  std::vector<part_segment*> returning;
  for (std::size_t i = 0; i < own.count(); ++i) {
    if (own.at(i).discarded) returning.push_back(&own.at(i));
  }
  if (returning.empty()) return;
  const std::size_t offset = own.offset_of(*returning.front());
  const std::size_t end = own.offset_of(*returning.back()) + returning.back()->place.bytes;
  // Discarded host memory that was kept is its own backup; everything else is taken anew.
  const auto kept = [](const part_segment& segment) {
    return segment.backup != nullptr && segment.where.kind == tier::host;
  };
  std::vector<memory_lease> leases(returning.size());
  for (std::size_t i = 0; i < returning.size(); ++i) {
    if (kept(*returning[i])) continue;
    leases[i] = source.acquire(returning[i]->where.kind, returning[i]->place.bytes);
  }
  announced_change change = announce(change_kind::restore, offset, end - offset);
  remap swap(*on, access);
  for (std::size_t i = 0; i < returning.size(); ++i) {
    part_segment& segment = *returning[i];
    swap.replace(segment.place, kept(segment) ? segment.backup : leases[i].get());
  }
  swap.apply();
  for (std::size_t i = 0; i < returning.size(); ++i) {
    if (!returning[i]->backup || !leases[i].get()) continue;
    const scratch_mapping scratch(*on, *returning[i]->backup, access);
    copies.copy(returning[i]->place.at, scratch.base(), returning[i]->place.bytes);
  }
  swap.commit();
  for (std::size_t i = 0; i < returning.size(); ++i) {
    part_segment& segment = *returning[i];
    segment.discarded = false;
    segment.where = segment.place.memory->location();
    if (leases[i].take()) source.recycle(std::move(segment.backup));
    segment.backup = nullptr;
  }
  commit(change, counts.restores);
}

// --- the public face
// ------------------------------------------------------------------------------

elastic_region::elastic_region(std::shared_ptr<driver> on, const region_options& options)
    : state_(std::make_unique<state>(std::move(on), options)) {}
elastic_region::~elastic_region() = default;
elastic_region::elastic_region(elastic_region&&) noexcept = default;
elastic_region& elastic_region::operator=(elastic_region&&) noexcept = default;

std::byte* elastic_region::data() const noexcept {
  return reinterpret_cast<std::byte*>(state_->range.base());
}
std::size_t elastic_region::size() const noexcept {
  return state_->own.size();
}
std::size_t elastic_region::reserved() const noexcept {
  return state_->limits.reserved;
}
std::size_t elastic_region::granularity() const noexcept {
  return state_->limits.granularity;
}
std::uint64_t elastic_region::epoch() const noexcept {
  return state_->epoch;
}
std::vector<segment> elastic_region::segments() const {
  std::vector<segment> all = state_->own.describe();
  for (const pending& waiting : state_->queue) {
    for (const auto& gone : waiting.retired) {
      all.push_back({.offset = state_->own.offset_of(*gone),
                     .bytes = gone->place.bytes,
                     .where = gone->where,
                     .state = segment_state::retiring});
    }
  }
  return all;
}
std::optional<placement_choice> elastic_region::placement() const {
  return state_->source.placement();
}
driver& elastic_region::on() const noexcept {
  return *state_->on;
}

region_statistics elastic_region::statistics() const {
  region_statistics all =
      describe_statistics(state_->counts, state_->own, state_->source, state_->copies);
  for (const pending& waiting : state_->queue) {
    for (const auto& gone : waiting.retired) {  // held until it is unmapped
      if (gone->backup) all.backup_bytes += gone->backup->size();
      if (gone->discarded) continue;
      (gone->where.kind == tier::device ? all.device_bytes : all.host_bytes) += gone->place.bytes;
    }
  }
  return all;
}

grown elastic_region::grow(tier kind, std::size_t bytes) {
  return state_->grow(kind, bytes);
}
std::size_t elastic_region::shrink(std::size_t bytes, const uses& in_use) {
  return state_->shrink(bytes, in_use);
}
void elastic_region::migrate(std::size_t index, tier kind, const uses& in_use) {
  state_->migrate(index, kind, in_use);
}
pending_change elastic_region::shrink_later(std::size_t bytes, const uses& in_use) {
  pending_change change;
  change.open_ = state_->shrink_later(bytes, in_use);
  return change;
}
pending_change elastic_region::migrate_later(std::size_t index, tier kind, const uses& in_use) {
  pending_change change;
  change.open_ = state_->migrate_later(index, kind, in_use);
  return change;
}
std::size_t elastic_region::poll() {
  return state_->poll();
}
void elastic_region::finish() {
  state_->finish();
}
void elastic_region::discard(contents kept, const uses& in_use, std::size_t first,
                             std::size_t count) {
  state_->discard(kept, in_use, first, count);
}
void elastic_region::restore() {
  state_->restore();
}
std::size_t elastic_region::trim_cache() {
  return state_->source.trim();
}
observer_subscription elastic_region::observe(region_observer observer) {
  return state_->observers.add(std::move(observer));
}

}  // namespace evmm
