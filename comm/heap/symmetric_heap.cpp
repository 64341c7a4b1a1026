// SPDX-License-Identifier: Apache-2.0
// The heap's public face, and what needs no memory: allocate, free, pools.
#include "comm/heap/symmetric_heap_state.hpp"
#include "lib/memory/one_stream.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <exception>
#include <iterator>
#include <limits>
#include <mutex>
#include <utility>

namespace evmm {

const char* to_string(tier_policy policy) noexcept {
  switch (policy) {
    case tier_policy::device_first:
      return "device_first";
    case tier_policy::device_only:
      return "device_only";
    case tier_policy::host_first:
      return "host_first";
    case tier_policy::host_only:
      return "host_only";
  }
  return "?";
}

namespace {

std::uint32_t number(pool_id pool) {
  return static_cast<std::uint32_t>(pool);
}

/// Options that every rank must give alike.
struct shared_heap_options {
  std::size_t growth_step;
  std::size_t check;
};

}  // namespace

// --- beginning and end ---------------------------------------------------------------------------

symmetric_heap::state::state(symmetric_region taken, const symmetric_heap_options& given)
    : region(std::move(taken)),
      options(given),
      // The region keeps the driver.
      used(std::shared_ptr<driver>(std::shared_ptr<void>(), &region.on()), region.device()),
      calls(given.calls_kept),
      happened(region.device()) {
  const auto all = region.ranks().all_gather_value(
      shared_heap_options{given.growth_step, static_cast<std::size_t>(given.check)},
      "symmetric_heap: options");
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r].growth_step == all[0].growth_step && all[r].check == all[0].check) continue;
    throw invalid_argument(
        fmt::format("the heap's options differ between ranks: rank 0 gave growth_step {} and check "
                    "{}, rank {} gave {} and {}",
                    all[0].growth_step, all[0].check, r, all[r].growth_step, all[r].check),
        "give every rank the same `growth_step` and `check`");
  }
  for (const segment& held : region.segments(region.rank())) {  // alike on all ranks
    if (held.state == segment_state::mapped) continue;
    throw invalid_argument(
        fmt::format("{} at {} of the region are discarded, and a heap would hand them out",
                    format_bytes(held.bytes), format_bytes(held.offset)),
        "restore() the region first");
  }
  books.add(account);
  pools[pool_id{}] = {};
  adopt_segments(pool_id{});
  // A segment that one rank has in host memory serves no request for device memory.
  std::uint64_t host = 0;
  auto segments = blocks.segments();
  for (std::size_t s = 0; s < segments.size(); ++s) {
    host |= std::uint64_t{segments[s].kind == tier::host} << s;
  }
  for (const std::uint64_t mask : region.ranks().all_gather_value(host, "symmetric_heap: tiers")) {
    for (std::size_t s = 0; s < segments.size(); ++s) {
      if ((mask >> s & 1) != 0) segments[s].kind = tier::host;
    }
  }
  set_segments(std::move(segments));
}

void symmetric_heap::state::check_open() const {
  if (closed) throw invalid_argument("the symmetric heap was closed", "make a new one");
}

void symmetric_heap::state::check_pool(pool_id pool) const {
  if (pools.contains(pool)) return;
  throw invalid_argument(fmt::format("the symmetric heap has no pool {}", number(pool)),
                         "create_pool() makes one");
}

void symmetric_heap::state::finish(std::uint64_t result) {
  calls.finish(result);
  if (options.check == divergence_check::every_call) meet();
}

void symmetric_heap::state::note(trace_action action, std::size_t offset, std::size_t bytes,
                                 native_stream stream, pool_id pool) {
  if (!happened.wanted()) return;
  happened.record({.action = action,
                   .at = reinterpret_cast<address>(region.local()) + offset,
                   .bytes = bytes,
                   .stream = stream,
                   .pool = pool,
                   .stack = happened.wants_stack(action) ? call_stack::here() : nullptr});
}

// --- allocate and free ---------------------------------------------------------------------------

std::size_t symmetric_heap::state::allocate(std::size_t bytes, native_stream stream,
                                            const symmetric_request& request) {
  require_one_stream(stream);
  const auto here = enter();
  check_pool(request.pool);
  if (!std::has_single_bit(request.alignment) || request.alignment > region.granularity()) {
    throw invalid_argument(
        fmt::format("cannot align an allocation to {} bytes", request.alignment),
        fmt::format("give a power of two up to the granularity, {}", region.granularity()));
  }
  if (bytes > region.reserved()) {
    throw invalid_argument(fmt::format("cannot allocate {} ({} bytes): the region reserves {}",
                                       format_bytes(bytes), bytes, format_bytes(region.reserved())),
                           "raise `reserve`; reserving addresses costs no memory");
  }
  if (region.on().capture(stream).status != capture_status::none) {
    throw invalid_argument("cannot allocate on a stream that is being captured into a graph",
                           "allocate before the capture: the address stays as long as the buffer");
  }
  settle_captured();
  const std::size_t size = heap_blocks::block_bytes(bytes);
  calls.begin({.call = heap_call::allocate,
               .tiers = static_cast<std::uint8_t>(request.tiers),
               .flag = request.may_span,
               .pool = number(request.pool),
               .first = bytes,
               .second = request.alignment});
  const std::size_t at = find_place(size, request);
  used.hand_over(at, size, stream);
  used.forget(at, size);
  heap_block& taken = blocks.take(at, size);
  taken.requested = bytes;
  taken.stream = stream;
  taken.tiers = request.tiers;
  bool at_peak = false;
  {
    const std::lock_guard held(account.guard());
    at_peak = account.allocate(class_of(size), size, bytes);
  }
  if (at_peak) books.settle(account);
  if (happened.wants_stack(trace_action::alloc)) taken.stack = call_stack::here();
  note(trace_action::alloc, at, size, stream, request.pool);
  finish(at);
  return at;
}

bool symmetric_heap::state::is_pending(std::size_t offset) const {
  return std::find(captured.begin(), captured.end(), offset) != captured.end();
}

heap_block& symmetric_heap::state::live(std::size_t offset, const char* doing) {
  check_open();
  heap_block* const found = blocks.find_live(offset);
  const bool freed = is_pending(offset);
  if (found != nullptr && !freed) return *found;
  throw invalid_argument(fmt::format("cannot {} offset {}: {}", doing, offset,
                                     freed ? "it was freed" : "no live allocation begins there"));
}

void symmetric_heap::state::free(std::size_t offset) {
  const auto here = enter();
  heap_block& block = live(offset, "free");
  calls.begin({.call = heap_call::free, .first = offset});
  {
    const std::lock_guard held(account.guard());
    account.defer(class_of(block.bytes), block.bytes, block.requested);
  }
  note(trace_action::free_requested, offset, block.bytes, block.stream,
       blocks.segments()[blocks.segment_at(offset)].pool);
  captured.push_back(offset);
  // The call is made, whatever comes: where an event cannot be recorded, the next call tries again.
  finish(0);
  settle_captured();
}

void symmetric_heap::state::settle_captured() {
  for (auto at = captured.begin(); at != captured.end();) {
    heap_block& block = *blocks.find_live(*at);
    std::vector<native_stream> streams{block.stream};
    if (block.other_streams) {
      streams.insert(streams.end(), block.other_streams->begin(), block.other_streams->end());
    }
    // In a capture no event can tell of work; the graph's replays are for its owner to mind.
    if (std::any_of(streams.begin(), streams.end(), [&](native_stream stream) {
          return region.on().capture(stream).status != capture_status::none;
        })) {
      ++at;
      continue;
    }
    used.add(block.at, block.bytes, streams);
    {
      const std::lock_guard held(account.guard());
      account.complete(class_of(block.bytes), block.bytes);
    }
    note(trace_action::free_completed, block.at, block.bytes, block.stream,
         blocks.segments()[blocks.segment_at(block.at)].pool);
    blocks.put(block);
    at = captured.erase(at);
  }
}

void symmetric_heap::state::record_stream(std::size_t offset, native_stream stream) {
  require_one_stream(stream);
  heap_block& block = live(offset, "record a stream on");
  calls.begin({.call = heap_call::record_stream, .first = offset});
  if (stream != block.stream) {
    if (!block.other_streams) block.other_streams = std::make_unique<std::vector<native_stream>>();
    auto& others = *block.other_streams;
    if (std::find(others.begin(), others.end(), stream) == others.end()) others.push_back(stream);
  }
  finish(0);
}

symmetric_heap::state::gathered_uses symmetric_heap::state::uses_of(const region_change& change,
                                                                    const uses& in_use) const {
  if (region.takes_down(change)) return uses_of(0, blocks.size(), in_use);
  return uses_of(change.offset, change.offset + change.bytes, in_use);
}

symmetric_heap::state::gathered_uses symmetric_heap::state::uses_of(std::size_t from,
                                                                    std::size_t to,
                                                                    const uses& in_use) const {
  gathered_uses all{{in_use.streams.begin(), in_use.streams.end()},
                    {in_use.events.begin(), in_use.events.end()}};
  const auto add = [&](native_stream stream) {
    if (std::find(all.streams.begin(), all.streams.end(), stream) == all.streams.end()) {
      all.streams.push_back(stream);
    }
  };
  blocks.for_live(from, to, [&](const heap_block& block) {
    add(block.stream);
    if (block.other_streams)
      std::for_each(block.other_streams->begin(), block.other_streams->end(), add);
  });
  const auto events = used.events(from, to);
  all.events.insert(all.events.end(), events.begin(), events.end());
  return all;
}

// --- the face ------------------------------------------------------------------------------------

symmetric_heap::symmetric_heap(symmetric_region region, const symmetric_heap_options& options)
    : state_(std::make_unique<state>(std::move(region), options)) {}

symmetric_heap::~symmetric_heap() {
  const std::size_t left =
      static_cast<std::size_t>(state_->account.allocated_count(size_class::small) +
                               state_->account.allocated_count(size_class::large));
  if (!state_->closed && left > 0) {
    log().warn("a symmetric heap of rank {} goes with {} live allocations",
               state_->region.rank().value, left);
  }
}

void symmetric_heap::close(const uses& in_use) {
  state& s = *state_;
  if (s.closed) return;
  const auto here = s.enter();
  const auto all = s.uses_of(0, s.blocks.size(), in_use);
  s.region.close(all.all());
  s.closed = true;
}

std::size_t symmetric_heap::allocate(std::size_t bytes, native_stream stream,
                                     const symmetric_request& request) {
  return state_->allocate(bytes, stream, request);
}
void symmetric_heap::free(std::size_t offset) {
  state_->free(offset);
}
void symmetric_heap::release(std::size_t offset) noexcept {
  if (state_->closed) return;
  log_failure("freeing a symmetric buffer", [&] { state_->free(offset); });
}
void symmetric_heap::record_stream(std::size_t offset, native_stream stream) {
  state_->record_stream(offset, stream);
}
std::size_t symmetric_heap::size_of(std::size_t offset) const {
  return state_->live(offset, "tell the size of").requested;
}

pool_id symmetric_heap::create_pool(const symmetric_pool_options& options) {
  state& s = *state_;
  s.check_open();
  s.calls.begin({.call = heap_call::create_pool, .flag = options.use_on_oom});
  const pool_id made{s.next_pool++};
  s.pools[made] = options;
  s.finish(number(made));
  return made;
}

void symmetric_heap::release_pool(pool_id pool) {
  state& s = *state_;
  const auto here = s.enter();
  s.check_pool(pool);
  if (pool == pool_id{}) throw invalid_argument("the default pool of a heap cannot be released");
  s.settle_captured();
  auto segments = s.blocks.segments();
  for (heap_segment& segment : segments) {
    if (segment.pool != pool) continue;
    if (s.blocks.any_live(segment.offset, segment.end())) {
      throw invalid_argument(fmt::format("pool {} still has live allocations", number(pool)),
                             "free them first");
    }
    segment.pool = pool_id{};
  }
  s.calls.begin({.call = heap_call::release_pool, .pool = number(pool)});
  s.set_segments(std::move(segments));
  s.pools.erase(pool);
  s.finish(0);
}

grown symmetric_heap::grow(tier kind, std::size_t bytes, pool_id pool) {
  state& s = *state_;
  s.check_open();
  s.check_pool(pool);
  s.calls.begin({.call = heap_call::grow,
                 .tiers = static_cast<std::uint8_t>(kind),
                 .pool = number(pool),
                 .first = bytes});
  const auto ranks_now = s.meet();
  s.require_room(kind, s.region.planned_growth(bytes), ranks_now);
  const grown added = s.grow(kind, bytes, pool);
  s.finish(added.bytes);
  return added;
}

void symmetric_heap::request_growth(tier kind, std::size_t bytes) {
  state_->check_open();
  std::size_t& asked = state_->asked[static_cast<std::size_t>(kind)];
  asked = std::max(asked, bytes);
}

std::size_t symmetric_heap::trim(std::size_t keep_free, const uses& in_use) {
  state& s = *state_;
  const auto here = s.enter();
  s.settle_captured();
  const std::size_t after = s.size_after_trim(keep_free);
  s.calls.begin({.call = heap_call::trim, .first = keep_free, .second = s.blocks.size() - after});
  s.meet();
  const std::size_t bytes = s.trim(after, in_use);
  s.finish(bytes);
  return bytes;
}

std::size_t symmetric_heap::migrate(std::size_t offset, std::size_t bytes, tier kind,
                                    const uses& in_use) {
  state& s = *state_;
  const auto here = s.enter();
  if (bytes > s.blocks.size() || offset > s.blocks.size() - bytes) {
    throw invalid_argument(fmt::format("cannot migrate {} bytes at offset {}: the heap has {}",
                                       bytes, offset, s.blocks.size()));
  }
  s.settle_captured();
  std::exception_ptr refused;
  try {
    s.check_leaves(offset, offset + bytes, kind);
  } catch (const invalid_argument&) {
    refused = std::current_exception();
  }
  s.calls.begin({.call = heap_call::migrate,
                 .tiers = static_cast<std::uint8_t>(kind),
                 .flag = refused != nullptr,
                 .first = offset,
                 .second = bytes});
  const auto touched = [&](const heap_segment& of) {
    return bytes > 0 && of.offset < offset + bytes && of.end() > offset;
  };
  const auto ranks_now = s.meet();
  s.require_room(kind, s.bytes_to_move(kind, touched), ranks_now);
  if (refused != nullptr) std::rethrow_exception(refused);
  const std::size_t moved = s.migrate(offset, offset + bytes, kind, in_use);
  s.finish(moved);
  return moved;
}

std::size_t symmetric_heap::migrate(pool_id pool, tier kind, const uses& in_use) {
  state& s = *state_;
  const auto here = s.enter();
  s.check_pool(pool);
  s.calls.begin({.call = heap_call::migrate_pool,
                 .tiers = static_cast<std::uint8_t>(kind),
                 .pool = number(pool)});
  const auto belongs = [&](const heap_segment& of) { return of.pool == pool; };
  const auto ranks_now = s.meet();
  s.require_room(kind, s.bytes_to_move(kind, belongs), ranks_now);
  std::size_t moved = 0;
  // Run by run: an allocation may lie in several segments.
  const std::vector<heap_segment> segments = s.blocks.segments();
  for (auto end = segments.begin(); end != segments.end();) {
    const auto first = std::find_if(end, segments.end(), belongs);
    end = std::find_if_not(first, segments.end(), belongs);
    if (first == end) continue;
    moved += s.migrate(first->offset, std::prev(end)->end(), kind, in_use);
  }
  s.finish(moved);
  return moved;
}

std::size_t symmetric_heap::compact(const uses& in_use) {
  state& s = *state_;
  const auto here = s.enter();
  s.calls.begin({.call = heap_call::compact});
  s.meet();
  const std::size_t left = s.compact(in_use);
  s.finish(left);
  return left;
}

void symmetric_heap::verify() {
  state_->check_open();
  state_->serve_requests(state_->meet());
}

symmetric_region& symmetric_heap::region() const {
  return state_->region;
}
std::uint64_t symmetric_heap::checksum() const noexcept {
  return state_->calls.state().checksum;
}

}  // namespace evmm
