// SPDX-License-Identifier: Apache-2.0
#include "comm/symmetric_state.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>

// The collective changes. What all ranks can work out from equal arguments is checked after the
// arguments were compared, so that it fails alike everywhere without another step.

namespace evmm {

struct proposal {
  std::uint8_t kind = 0;    ///< change_kind
  std::uint8_t detail = 0;  ///< contents, for discard
  std::uint8_t moves = 0;   ///< migrate: whether this rank's segment moves; may differ
  std::uint64_t host = 0;   ///< compact: a bit for each of this rank's segments there; may differ
  std::uint64_t first = 0;  ///< bytes, or a segment's index
  std::uint64_t count = 0;
  std::uint64_t epoch = 0;
  std::uint64_t followers = 0;  ///< which collective observers this rank has
  std::uint64_t region = 0;     ///< which region is meant

  bool agrees_with(const proposal& other) const {
    return kind == other.kind && detail == other.detail && first == other.first &&
           count == other.count && epoch == other.epoch && region == other.region;
  }
};

namespace {

std::string to_string(const proposal& proposed) {
  const auto kind = static_cast<change_kind>(proposed.kind);
  std::string text = evmm::to_string(kind);
  switch (kind) {
    case change_kind::grow:
    case change_kind::shrink:
      text += fmt::format(" by {} ({} bytes)", format_bytes(proposed.first), proposed.first);
      break;
    case change_kind::migrate:
      text += fmt::format(" segment {}", proposed.first);
      break;
    case change_kind::discard:
      text += fmt::format(" segments {}+{} ({})", proposed.first, proposed.count,
                          proposed.detail == 0 ? "drop" : "backup");
      break;
    case change_kind::compact:
      text += fmt::format(" segments {}+{}", proposed.first, proposed.count);
      break;
    case change_kind::restore:
      break;
  }
  return fmt::format("{} at epoch {}", text, proposed.epoch);
}

}  // namespace

std::vector<proposal> symmetric_region::state::propose(proposal mine) {
  check_open();
  mine.followers = followers.signature();
  mine.region = number;
  times = {};
  const stopwatch clock(times.propose);
  auto all = ranks->all_gather_value(mine, "propose a change");
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].agrees_with(all[0])) {
      if (all[r].followers == all[0].followers) continue;
      throw invalid_argument(fmt::format("{}: rank {} has other collective observers than rank 0",
                                         to_string(all[0]), r),
                             "make and destroy windows on all ranks alike, in the same order");
    }
    throw invalid_argument(fmt::format("ranks ask for different changes: rank 0 {}, rank {} {}{}",
                                       to_string(all[0]), r, to_string(all[r]),
                                       all[r].region == all[0].region ? "" : " of another region"),
                           "make the same calls in the same order with the same sizes everywhere");
  }
  return all;
}

void symmetric_region::state::run_change(collective_change change, std::uint64_t& counter) {
  change.what.epoch = epoch;
  const auto commit = std::move(change.commit);
  change.commit = [&](std::vector<memory_ptr> unused) {
    commit(std::move(unused));
    ++counter;
    counts.peak_bytes = std::max(counts.peak_bytes,
                                 own().mapped_bytes(tier::device) + own().mapped_bytes(tier::host));
#ifdef EVMM_DEBUG_CHECKS
    for (const part& checked : parts) checked.check();
#endif
  };
  run({*ranks, *on, device, *exchange, access, observers, followers, [this] { return own_part(); },
       epoch, counts.rollbacks, times},
      change);
}

region_part symmetric_region::state::own_part() {
  return {reinterpret_cast<std::byte*>(own().base()), own().describe()};
}

grown symmetric_region::state::grow(tier kind, std::size_t bytes, const uses& in_use) {
  propose({.kind = static_cast<std::uint8_t>(change_kind::grow), .first = bytes, .epoch = epoch});
  const std::vector<std::size_t> sizes = plan_growth(limits, own().size(), own().count(), bytes);
  const std::size_t total = std::accumulate(sizes.begin(), sizes.end(), std::size_t{0});
  const std::size_t offset = own().size();
  const auto me = static_cast<std::size_t>(ranks->node_rank());
  std::vector<memory_lease> leases;
  std::vector<std::vector<std::unique_ptr<part_segment>>> added(parts.size());
  collective_change change{.what = {.kind = change_kind::grow, .offset = offset, .bytes = total},
                           .in_use = in_use};
  change.prepare = [&] {
    source->check_capacity(kind, total);
    for (const std::size_t size : sizes) leases.push_back(source->acquire(kind, size));
    for (std::size_t r = 0; r < parts.size(); ++r) {
      parts[r].reserve(sizes.size());
      for (std::size_t at = offset; const std::size_t size : sizes) {
        added[r].push_back(parts[r].make(at, size, {}));
        at += size;
      }
    }
  };
  change.hand_out = [&] {
    std::vector<const physical_memory*> handles;
    for (const memory_lease& lease : leases) handles.push_back(lease.get().get());
    return handles;
  };
  change.plan = [&](remap& swap, const handed_out& shared) {
    for (std::size_t r = 0; r < parts.size(); ++r) {
      for (std::size_t i = 0; i < sizes.size(); ++i) {
        const memory_ptr& next = r == me ? leases[i].get() : shared[r].at(i);
        added[r][i]->where = next->location();
        swap.replace(added[r][i]->place, next);
      }
    }
  };
  change.commit = [&](std::vector<memory_ptr>) {
    for (memory_lease& lease : leases) lease.take();
    for (std::size_t r = 0; r < parts.size(); ++r) parts[r].push_all(std::move(added[r]));
  };
  run_change(std::move(change), counts.grows);
  return {offset, total};
}

std::size_t symmetric_region::state::shrink(std::size_t bytes, const uses& in_use) {
  propose({.kind = static_cast<std::uint8_t>(change_kind::shrink), .first = bytes, .epoch = epoch});
  const std::size_t count = tail_segments_within(own().sizes(), bytes);
  if (count == 0) return 0;
  std::vector<std::size_t> leaving(count);
  for (std::size_t i = 0; i < count; ++i) leaving[i] = own().count() - count + i;
  collective_change change{.what = span_of(change_kind::shrink, leaving), .in_use = in_use};
  const std::size_t dropped = change.what.bytes;
  change.plan = [&](remap& swap, const handed_out&) {
    for (part& of_rank : parts) {
      for (const std::size_t index : leaving) swap.replace(of_rank.at(index).place, nullptr);
    }
  };
  change.commit = [&](std::vector<memory_ptr> unused) {
    for (auto& gone : own().pop(count)) source->recycle(std::move(gone->backup));
    for (part& of_rank : parts) {
      if (&of_rank != &own()) of_rank.pop(count);
    }
    for (memory_ptr& memory : unused) source->recycle(std::move(memory));
  };
  run_change(std::move(change), counts.shrinks);
  return dropped;
}

void symmetric_region::state::migrate(std::size_t index, tier kind, const uses& in_use) {
  check_open();
  const auto me = static_cast<std::size_t>(ranks->node_rank());
  const bool moves_here = index < own().count() && own().at(index).where.kind != kind;
  const auto proposed = propose({.kind = static_cast<std::uint8_t>(change_kind::migrate),
                                 .moves = std::uint8_t{moves_here},
                                 .first = index,
                                 .epoch = epoch});
  if (own().at(index).discarded) {
    throw invalid_argument(
        fmt::format("cannot migrate segment {}: its memory was discarded", index),
        "restore() first");
  }
  if (std::none_of(proposed.begin(), proposed.end(), [](const auto& of) { return of.moves; })) {
    return;
  }
  const auto moves = [&](std::size_t r) {
    return proposed[static_cast<std::size_t>(ranks->node_ranks()[r].value)].moves != 0;
  };
  slot& place = own().at(index).place;
  memory_lease next;
  collective_change change{.what = span_of(change_kind::migrate, {index}), .in_use = in_use};
  change.prepare = [&] {
    if (moves_here) next = source->acquire(kind, place.bytes);
  };
  change.copy_out = [&] {
    if (!moves_here) return;
    const scratch_mapping scratch(*on, *next.get(), access);
    copies->copy(scratch.base(), place.at, place.bytes);
  };
  change.hand_out = [&] {
    return moves_here ? std::vector<const physical_memory*>{next.get().get()}
                      : std::vector<const physical_memory*>{};
  };
  change.plan = [&](remap& swap, const handed_out& shared) {
    for (std::size_t r = 0; r < parts.size(); ++r) {
      if (moves(r)) swap.replace(parts[r].at(index).place, r == me ? next.get() : shared[r].at(0));
    }
  };
  change.commit = [&](std::vector<memory_ptr> unused) {
    next.take();
    for (std::size_t r = 0; r < parts.size(); ++r) {
      part_segment& moved = parts[r].at(index);
      if (moves(r)) moved.where = moved.place.memory->location();
    }
    for (memory_ptr& memory : unused) source->recycle(std::move(memory));
  };
  run_change(std::move(change), counts.migrations);
}

std::vector<std::size_t> symmetric_region::state::select(index_range within, bool discarded) {
  std::vector<std::size_t> chosen;
  for (std::size_t i = within.first; i < within.last; ++i) {
    if (own().at(i).discarded == discarded) chosen.push_back(i);
  }
  return chosen;
}

region_change symmetric_region::state::span_of(change_kind kind,
                                               const std::vector<std::size_t>& indices) {
  const part_segment& last = own().at(indices.back());
  const std::size_t offset = own().offset_of(own().at(indices.front()));
  return {
      .kind = kind, .offset = offset, .bytes = own().offset_of(last) + last.place.bytes - offset};
}

void symmetric_region::state::discard(contents kept, const uses& in_use, std::size_t first,
                                      std::size_t count) {
  propose({.kind = static_cast<std::uint8_t>(change_kind::discard),
           .detail = static_cast<std::uint8_t>(kept),
           .first = first,
           .count = count,
           .epoch = epoch});
  const auto leaving = select(clip(first, count, own().count()), false);
  if (leaving.empty()) return;
  std::vector<memory_lease> backups(leaving.size());
  collective_change change{.what = span_of(change_kind::discard, leaving), .in_use = in_use};
  if (kept == contents::backup) {
    change.prepare = [&] {
      for (std::size_t i = 0; i < leaving.size(); ++i) {
        const part_segment& segment = own().at(leaving[i]);
        if (segment.where.kind == tier::device) {
          backups[i] = source->acquire(tier::host, segment.place.bytes);
        }
      }
    };
    change.copy_out = [&] {
      for (std::size_t i = 0; i < leaving.size(); ++i) {
        if (!backups[i].get()) continue;
        const scratch_mapping scratch(*on, *backups[i].get(), access);
        const slot& place = own().at(leaving[i]).place;
        copies->copy(scratch.base(), place.at, place.bytes);
      }
    };
  }
  std::vector<memory_ptr> own_memory;
  change.plan = [&](remap& swap, const handed_out&) {
    for (const std::size_t index : leaving) own_memory.push_back(own().at(index).place.memory);
    for (part& of_rank : parts) {
      for (const std::size_t index : leaving) swap.replace(of_rank.at(index).place, nullptr);
    }
  };
  change.commit = [&](std::vector<memory_ptr>) {
    for (std::size_t i = 0; i < leaving.size(); ++i) {
      for (part& of_rank : parts) of_rank.at(leaving[i]).discarded = true;
      // Host memory is its own backup: nothing is won by copying it to other host memory.
      if (kept == contents::backup) {
        own().at(leaving[i]).backup =
            backups[i].get() ? backups[i].take() : std::move(own_memory[i]);
      }
      source->release(std::move(own_memory[i]));
    }
  };
  run_change(std::move(change), counts.discards);
}

void symmetric_region::state::restore() {
  propose({.kind = static_cast<std::uint8_t>(change_kind::restore), .epoch = epoch});
  const auto returning = select({0, own().count()}, true);
  if (returning.empty()) return;
  const auto me = static_cast<std::size_t>(ranks->node_rank());
  // Discarded host memory that was kept is its own backup; everything else is taken anew.
  const auto kept = [](const part_segment& segment) {
    return segment.backup != nullptr && segment.where.kind == tier::host;
  };
  std::vector<memory_lease> leases(returning.size());
  std::vector<memory_ptr> next(returning.size());
  collective_change change{.what = span_of(change_kind::restore, returning)};
  change.prepare = [&] {
    for (std::size_t i = 0; i < returning.size(); ++i) {
      const part_segment& segment = own().at(returning[i]);
      if (!kept(segment)) leases[i] = source->acquire(segment.where.kind, segment.place.bytes);
      next[i] = kept(segment) ? segment.backup : leases[i].get();
    }
  };
  change.hand_out = [&] {
    std::vector<const physical_memory*> handles;
    for (const memory_ptr& memory : next) handles.push_back(memory.get());
    return handles;
  };
  change.plan = [&](remap& swap, const handed_out& shared) {
    for (std::size_t r = 0; r < parts.size(); ++r) {
      for (std::size_t i = 0; i < returning.size(); ++i) {
        swap.replace(parts[r].at(returning[i]).place, r == me ? next[i] : shared[r].at(i));
      }
    }
  };
  change.copy_in = [&] {
    for (std::size_t i = 0; i < returning.size(); ++i) {
      const part_segment& segment = own().at(returning[i]);
      if (!segment.backup || !leases[i].get()) continue;
      const scratch_mapping scratch(*on, *segment.backup, access);
      copies->copy(segment.place.at, scratch.base(), segment.place.bytes);
    }
  };
  change.commit = [&](std::vector<memory_ptr>) {
    for (std::size_t i = 0; i < returning.size(); ++i) {
      for (part& of_rank : parts) {
        part_segment& segment = of_rank.at(returning[i]);
        segment.discarded = false;
        segment.where = segment.place.memory->location();
      }
      part_segment& mine = own().at(returning[i]);
      next[i] = nullptr;
      if (leases[i].take()) source->recycle(std::move(mine.backup));
      mine.backup = nullptr;
    }
  };
  run_change(std::move(change), counts.restores);
}

std::vector<index_range> symmetric_region::state::runs_of_one_tier(
    index_range within, const std::vector<proposal>& proposed) {
  const auto alike = [&](std::size_t a, std::size_t b) {
    return std::all_of(proposed.begin(), proposed.end(), [&](const proposal& of) {
      return ((of.host >> a) & 1) == ((of.host >> b) & 1);
    });
  };
  std::vector<index_range> runs;
  for (std::size_t i = within.first; i < within.last;) {
    std::size_t end = i + 1;
    while (end < within.last && !own().at(i).discarded && !own().at(end).discarded &&
           alike(i, end)) {
      ++end;
    }
    if (end > i + 1) runs.push_back({i, end});
    i = end;
  }
  return runs;
}

std::size_t symmetric_region::state::compact(const uses& in_use, std::size_t first,
                                             std::size_t count) {
  check_open();
  std::uint64_t host = 0;
  for (std::size_t i = 0; i < own().count(); ++i) {
    host |= std::uint64_t{own().at(i).where.kind == tier::host} << i;
  }
  const auto proposed = propose({.kind = static_cast<std::uint8_t>(change_kind::compact),
                                 .host = host,
                                 .first = first,
                                 .count = count,
                                 .epoch = epoch});
  const auto runs = runs_of_one_tier(clip(first, count, own().count()), proposed);
  if (runs.empty()) return own().count();
  const auto me = static_cast<std::size_t>(ranks->node_rank());
  const auto bytes_of = [&](const index_range& run) {
    const part_segment& last = own().at(run.last - 1);
    return last.place.at + last.place.bytes - own().at(run.first).place.at;
  };
  std::vector<memory_lease> leases;
  std::vector<std::vector<std::unique_ptr<part_segment>>> merged(parts.size());
  collective_change change{
      .what = span_of(change_kind::compact, {runs.front().first, runs.back().last - 1}),
      .in_use = in_use};
  change.prepare = [&] {
    for (const index_range& run : runs) {
      leases.push_back(source->acquire(own().at(run.first).where.kind, bytes_of(run)));
      for (std::size_t r = 0; r < parts.size(); ++r) {
        const part_segment& head = parts[r].at(run.first);
        merged[r].push_back(parts[r].make(parts[r].offset_of(head), bytes_of(run), head.where));
      }
    }
  };
  change.copy_out = [&] {
    for (std::size_t i = 0; i < runs.size(); ++i) {
      const scratch_mapping scratch(*on, *leases[i].get(), access);
      copies->copy(scratch.base(), own().at(runs[i].first).place.at, bytes_of(runs[i]));
    }
  };
  change.hand_out = [&] {
    std::vector<const physical_memory*> handles;
    for (const memory_lease& lease : leases) handles.push_back(lease.get().get());
    return handles;
  };
  change.plan = [&](remap& swap, const handed_out& shared) {
    for (std::size_t r = 0; r < parts.size(); ++r) {
      for (std::size_t i = 0; i < runs.size(); ++i) {
        for (std::size_t s = runs[i].first; s < runs[i].last; ++s) {
          swap.replace(parts[r].at(s).place, nullptr);
        }
        const memory_ptr& next = r == me ? leases[i].get() : shared[r].at(i);
        merged[r][i]->where = next->location();
        swap.replace(merged[r][i]->place, next);
      }
    }
  };
  change.commit = [&](std::vector<memory_ptr> unused) {
    for (memory_lease& lease : leases) lease.take();
    for (std::size_t r = 0; r < parts.size(); ++r) {
      for (std::size_t i = runs.size(); i-- > 0;) {  // the last first: indices before it hold
        parts[r].merge(runs[i].first, runs[i].last - runs[i].first, std::move(merged[r][i]));
      }
    }
    for (memory_ptr& memory : unused) source->recycle(std::move(memory));
  };
  run_change(std::move(change), counts.compactions);
  return own().count();
}

}  // namespace evmm
