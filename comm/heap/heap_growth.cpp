// SPDX-License-Identifier: Apache-2.0
// How a heap gets memory, moves it and gives it back, together with all ranks.
#include "comm/heap/symmetric_heap_state.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <utility>

namespace evmm {

namespace {

std::size_t index_of(tier kind) {
  return static_cast<std::size_t>(kind);
}

std::span<const tier> order_of(tier_policy policy) {
  static constexpr std::array<tier, 2> device_first{tier::device, tier::host};
  static constexpr std::array<tier, 2> host_first{tier::host, tier::device};
  const bool both = policy == tier_policy::device_first || policy == tier_policy::host_first;
  const bool device = policy == tier_policy::device_first || policy == tier_policy::device_only;
  return std::span(device ? device_first : host_first).first(both ? 2 : 1);
}

/// The rank with the least room in a tier.
std::size_t tightest(const std::vector<heap_status>& ranks_now, tier kind) {
  const auto least =
      std::min_element(ranks_now.begin(), ranks_now.end(), [&](const auto& a, const auto& b) {
        return a.room[index_of(kind)] < b.room[index_of(kind)];
      });
  return static_cast<std::size_t>(least - ranks_now.begin());
}

std::size_t room_of(const std::vector<heap_status>& ranks_now, tier kind) {
  return ranks_now[tightest(ranks_now, kind)].room[index_of(kind)];
}

/// What gives a tier more room on the rank that has least.
const char* more_room(const std::vector<heap_status>& ranks_now, tier kind) {
  const bool limited = ranks_now[tightest(ranks_now, kind)].limited[index_of(kind)];
  if (kind == tier::host) {
    return limited ? "raise host_limit" : "free what else takes the host's memory";
  }
  return limited ? "raise device_limit" : "free what else takes the device's memory";
}

}  // namespace

// --- what there is ---------------------------------------------------------------------------

std::size_t symmetric_heap::state::segment_bytes(tier kind) const {
  std::size_t bytes = 0;
  for (const heap_segment& segment : blocks.segments()) {
    if (segment.kind == kind) bytes += segment.bytes;
  }
  return bytes;
}

std::size_t symmetric_heap::state::bytes_to_move(
    tier kind, const std::function<bool(const heap_segment&)>& among) const {
  std::size_t bytes = 0;
  for (const heap_segment& segment : blocks.segments()) {
    if (segment.kind != kind && among(segment)) bytes += segment.bytes;
  }
  return bytes;
}

void symmetric_heap::state::set_segments(std::vector<heap_segment> segments) {
  blocks.set_segments(std::move(segments));
  segment_count.add(static_cast<std::int64_t>(blocks.segments().size()) - segment_count.current);
  reserved_bytes.add(static_cast<std::int64_t>(blocks.size()) - reserved_bytes.current);
}

void symmetric_heap::state::adopt_segments(pool_id pool) {
  std::vector<heap_segment> segments;
  for (const segment& held : region.segments(region.rank())) {
    const bool known = held.offset < blocks.size();
    const heap_segment* const before =
        known ? &blocks.segments()[blocks.segment_at(held.offset)] : nullptr;
    segments.push_back({.offset = held.offset,
                        .bytes = held.bytes,
                        .pool = known ? before->pool : pool,
                        .kind = known ? before->kind : held.where.kind});
  }
  set_segments(std::move(segments));
}

std::vector<heap_status> symmetric_heap::state::meet() {
  const auto left = [](std::size_t limit, std::size_t taken) {
    return limit > taken ? limit - taken : 0;
  };
  // Where the driver cannot tell, and of host memory, whose free count says little, taking it is
  // the check.
  std::size_t device_free = static_cast<std::size_t>(-1);
  log_failure("asking for the device's free memory", [&] {
    device_free = region.on().usage(memory_location::on(region.device())).free_bytes +
                  region.statistics().cached_device_bytes;
  });
  const std::size_t device_allowed = left(options.device_limit, segment_bytes(tier::device));
  const heap_status mine{.calls = calls.state(),
                         .room = {std::min(device_free, device_allowed),
                                  left(options.host_limit, segment_bytes(tier::host))},
                         .asked = asked,
                         .limited = {device_allowed <= device_free,
                                     options.host_limit != symmetric_heap_options().host_limit}};
  auto all = region.ranks().all_gather_value(mine, "symmetric_heap: meet");
  std::vector<call_state> states;
  for (const heap_status& of : all) states.push_back(of.calls);
  calls.compare(region.ranks(), states);
  return all;
}

void symmetric_heap::state::require_room(tier kind, std::size_t bytes,
                                         const std::vector<heap_status>& ranks_now) const {
  const std::size_t rank = tightest(ranks_now, kind);
  const std::size_t room = room_of(ranks_now, kind);
  if (bytes <= room) return;
  throw out_of_memory(
      fmt::format("cannot take {} more of {} for the symmetric heap: rank {} may take {}",
                  format_bytes(bytes), to_string(kind), rank, format_bytes(room)),
      fmt::format(
          "{}, or {}",
          kind == tier::device ? "migrate what is cold to the host tier" : "trim what is free",
          more_room(ranks_now, kind)));
}

// --- growing ---------------------------------------------------------------------------------

grown symmetric_heap::state::grow(tier kind, std::size_t bytes, pool_id pool) {
  const region_change next{.kind = change_kind::grow, .offset = region.size(), .bytes = bytes};
  const grown added = region.grow(kind, bytes, uses_of(next, {}).all());
  adopt_segments(pool);
  note(trace_action::segment_map, added.offset, added.bytes, nullptr, pool);
  return added;
}

bool symmetric_heap::state::serve_requests(const std::vector<heap_status>& ranks_now) {
  bool any = false;
  for (const tier kind : {tier::device, tier::host}) {
    std::size_t most = 0;
    for (const heap_status& of : ranks_now) most = std::max(most, of.asked[index_of(kind)]);
    if (most > 0) any |= try_grow(kind, most, most, pool_id{}, ranks_now);
  }
  asked = {};
  return any;
}

bool symmetric_heap::state::try_grow(tier kind, std::size_t least, std::size_t best, pool_id pool,
                                     const std::vector<heap_status>& ranks_now) {
  const std::size_t granule = region.granularity();
  const std::size_t room =
      std::min(room_of(ranks_now, kind), region.reserved() - region.size()) / granule * granule;
  if (least > room || region.segments(region.rank()).size() >= region.max_segments()) return false;
  least = round_up(least, granule);  // no more than the room
  for (const std::size_t bytes : {std::min(std::max(least, best), room), least}) {
    if (region.planned_growth(bytes) > room) continue;
    try {
      grow(kind, bytes, pool);
      return true;
    } catch (const out_of_memory&) {
      // Ranks may share a device, or others have taken it meanwhile. All ranks come here.
    }
  }
  return false;
}

std::optional<std::size_t> symmetric_heap::state::grow_spanning(
    std::size_t bytes, const symmetric_request& request,
    const std::vector<heap_status>& ranks_now) {
  const auto order = order_of(request.tiers);
  const auto missing = [&] {
    return blocks.shortfall(request.pool, std::nullopt, bytes, request.alignment);
  };
  const std::size_t before = region.size();
  const std::size_t first = std::min(
      room_of(ranks_now, order[0]) / region.granularity() * region.granularity(), missing());
  const auto give_back = [&] {
    if (region.size() == before) return;
    log_failure("giving back a growth that was not enough", [&] {
      drop(before, request.pool, {});
      adopt_segments(request.pool);
    });
  };
  try {
    if (first > 0) try_grow(order[0], first, first, request.pool, ranks_now);
    if (const std::size_t rest = missing();
        rest > 0 && !try_grow(order[1], rest, rest, request.pool, ranks_now)) {
      give_back();
      return std::nullopt;
    }
  } catch (...) {
    give_back();
    throw;
  }
  return blocks.find_spanning(request.pool, bytes, request.alignment);
}

std::size_t symmetric_heap::state::find_place(std::size_t bytes, const symmetric_request& request) {
  const auto order = order_of(request.tiers);
  const bool may_span = request.may_span && order.size() == 2;
  const pool_id pool = request.pool;
  const auto free_block = [&](tier kind) {
    return blocks.find(pool, kind, bytes, request.alignment);
  };
  if (const auto at = free_block(order[0])) return *at;
  // What may span begins at least in the tier that it prefers, as long as there is more to be had.
  if (may_span) {
    if (const auto at = blocks.find_spanning(pool, bytes, request.alignment, order[0])) return *at;
  }

  ++growths;
  auto ranks_now = meet();
  if (serve_requests(ranks_now)) {
    if (const auto at = free_block(order[0])) return *at;
    ranks_now = meet();
  }
  const std::size_t best = std::max(options.growth_step, region.size() / 8);
  const auto more = [&](tier kind) -> std::optional<std::size_t> {
    const std::size_t least = blocks.shortfall(pool, kind, bytes, request.alignment);
    if (!try_grow(kind, least, best, pool, ranks_now)) return std::nullopt;
    return free_block(kind);
  };
  if (const auto at = more(order[0])) return *at;
  if (order.size() == 2) {
    if (may_span) {
      if (const auto at = blocks.find_spanning(pool, bytes, request.alignment)) return *at;
    }
    if (const auto at = free_block(order[1])) return *at;
    if (const auto at = may_span ? grow_spanning(bytes, request, ranks_now) : more(order[1]))
      return *at;
  }
  if (pool == pool_id{}) {
    for (const auto& [other, its] : pools) {
      if (!its.use_on_oom) continue;
      for (const tier kind : order) {
        if (const auto at = blocks.find(other, kind, bytes, request.alignment)) return *at;
      }
    }
  }
  fail(bytes, request, ranks_now);
}

void symmetric_heap::state::fail(std::size_t bytes, const symmetric_request& request,
                                 const std::vector<heap_status>& ranks_now) {
  ++ooms;
  note(trace_action::oom, 0, bytes, nullptr, request.pool);
  std::string text =
      fmt::format("cannot allocate {} ({} bytes, {}{}) in pool {} of the symmetric heap",
                  format_bytes(bytes), bytes, to_string(request.tiers),
                  request.may_span ? ", may span" : "", static_cast<std::uint64_t>(request.pool));
  for (const tier kind : order_of(request.tiers)) {
    const std::size_t rank = tightest(ranks_now, kind);
    const std::size_t room = ranks_now[rank].room[index_of(kind)];
    const auto free = blocks.free_in(request.pool, kind);
    text +=
        fmt::format("; {}: the heap has {}, {} of it free in the pool in blocks of at most {}, ",
                    to_string(kind), format_bytes(segment_bytes(kind)), format_bytes(free.bytes),
                    format_bytes(free.largest));
    if (kind == tier::host && room > region.reserved()) {
      text += "more was refused or does not fit";
    } else {
      text += fmt::format("rank {} may take {} more", rank, format_bytes(room));
    }
  }
  const std::size_t left = region.reserved() - region.size();
  std::string help;
  if (region.segments(region.rank()).size() >= region.max_segments()) {
    help = "all segments of the region are in use: compact() merges them, or raise max_segments";
  } else if (left < bytes) {
    text += fmt::format("; {} of addresses are left", format_bytes(left));
    help = "raise the region's `reserve`; addresses cost no memory";
  } else if (order_of(request.tiers).size() == 1) {
    help =
        request.tiers == tier_policy::device_only
            ? fmt::format("allow the host tier (device_first), migrate what is cold, or {}",
                          more_room(ranks_now, tier::device))
            : fmt::format("allow the device (host_first), or {}", more_room(ranks_now, tier::host));
  } else {
    help = fmt::format(
        "free or trim what is not needed, let it span both tiers (may_span), or {} and {}",
        more_room(ranks_now, tier::device), more_room(ranks_now, tier::host));
  }
  finish(call_record::unfinished - 1);
  throw out_of_memory(std::move(text), std::move(help));
}

// --- moving and giving back --------------------------------------------------------------------

void symmetric_heap::state::drop(std::size_t after, pool_id pool, const uses& in_use) {
  const region_change leaving{
      .kind = change_kind::shrink, .offset = after, .bytes = region.size() - after};
  note(trace_action::segment_unmap, after, leaving.bytes, nullptr, pool);
  try {
    region.shrink(leaving.bytes, uses_of(leaving, in_use).all());
  } catch (...) {
    note(trace_action::segment_map, after, leaving.bytes, nullptr, pool);
    throw;
  }
}

std::size_t symmetric_heap::state::size_after_trim(std::size_t keep_free) const {
  const auto& segments = blocks.segments();
  std::size_t left = blocks.free_bytes();
  std::size_t count = segments.size();
  for (; count > 0; --count) {
    const heap_segment& last = segments[count - 1];
    const bool is_free = !blocks.any_live(last.offset, last.end());
    if (left - std::min(left, last.bytes) < keep_free || !is_free) break;
    left -= last.bytes;
  }
  return count == 0 ? 0 : segments[count - 1].end();
}

std::size_t symmetric_heap::state::trim(std::size_t after, const uses& in_use) {
  const std::size_t before = blocks.size();
  if (after < before) {
    drop(after, pool_id{}, in_use);
    used.forget(after, before - after);
    auto segments = blocks.segments();
    std::erase_if(segments, [&](const heap_segment& each) { return each.offset >= after; });
    set_segments(std::move(segments));
  }
  region.trim_cache();
  return before - after;
}

void symmetric_heap::state::check_leaves(std::size_t from, std::size_t to, tier kind) const {
  if (from == to || kind == tier::device) return;
  const heap_segment& first = blocks.segments()[blocks.segment_at(from)];
  const heap_segment& last = blocks.segments()[blocks.segment_at(to - 1)];
  blocks.for_live(first.offset, last.end(), [&](const heap_block& block) {
    if (block.tiers != tier_policy::device_only) return;
    if (block.at >= from && block.at + block.bytes <= to) return;
    throw invalid_argument(
        fmt::format("cannot move {} bytes at offset {} to HOST_NUMA: the device_only allocation of "
                    "{} bytes at offset {} lies in the same segment",
                    to - from, from, block.bytes, block.at),
        "name a range that holds it too, or keep what moves in a pool of its own");
  });
}

std::size_t symmetric_heap::state::migrate(std::size_t from, std::size_t to, tier kind,
                                           const uses& in_use) {
  if (from == to) return 0;
  const std::size_t first = blocks.segment_at(from);
  const std::size_t last = blocks.segment_at(to - 1);
  std::size_t moved = 0;
  for (std::size_t i = first; i <= last; ++i) {
    const heap_segment segment = blocks.segments()[i];
    const region_change move{
        .kind = change_kind::migrate, .offset = segment.offset, .bytes = segment.bytes};
    region.migrate(i, kind, uses_of(move, in_use).all());
    if (segment.kind == kind) continue;
    auto segments = blocks.segments();
    segments[i].kind = kind;
    set_segments(std::move(segments));
    moved += segment.bytes;
  }
  return moved;
}

std::size_t symmetric_heap::state::compact(const uses& in_use) {
  const auto merge = [&](auto& again, std::size_t first, std::size_t count) -> void {
    if (count < 2) return;
    const std::size_t from = blocks.segments()[first].offset;
    const std::size_t to = blocks.segments()[first + count - 1].end();
    const region_change merged{.kind = change_kind::compact, .offset = from, .bytes = to - from};
    try {
      region.compact(uses_of(merged, in_use).all(), first, count);
      adopt_segments(pool_id{});
    } catch (const out_of_memory&) {
      if (count == 2) return;
      again(again, first + count / 2, count - count / 2);
      again(again, first, count / 2);
    }
  };
  for (std::size_t last = blocks.segments().size(); last > 0;) {
    const auto& segments = blocks.segments();
    std::size_t first = last - 1;
    while (first > 0 && segments[first - 1].pool == segments[last - 1].pool &&
           segments[first - 1].kind == segments[last - 1].kind) {
      --first;
    }
    merge(merge, first, last - first);
    last = first;
  }
  return blocks.segments().size();
}

}  // namespace evmm
