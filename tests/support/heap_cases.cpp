// SPDX-License-Identifier: Apache-2.0
#include "tests/support/heap_cases.hpp"

#include "tests/support/fault_driver.hpp"
#include "tests/support/heap_checks.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

// --- allocation ----------------------------------------------------------------------------------

void grows_when_full_and_reuses_what_is_freed(const rank_context& at) {
  symmetric_heap heap(at.make(), {.growth_step = at.granule()});
  EXPECT_EQ(heap.region().size(), 0u);
  const std::size_t a = heap.allocate(1000);
  EXPECT_EQ(a, 0u);
  EXPECT_EQ(heap.region().size(), at.granule());
  const std::size_t b = heap.allocate(at.granule());
  EXPECT_EQ(b, 1024u) << "the growth continues what was free at the end";
  EXPECT_EQ(heap.region().size(), 2 * at.granule());
  EXPECT_EQ(heap.size_of(a), 1000u);
  write(at, heap, b, at.granule());
  expect_seen_by_all(at, heap, b, at.granule());
  heap.free(a);
  EXPECT_EQ(heap.allocate(600), a) << "best fit";
  heap.free(b);
  EXPECT_EQ(heap.allocate(512), 1024u);
  EXPECT_EQ(heap.region().epoch(), 2u);
  heap.check_invariants();
  heap.verify();
  heap.close();
}

void aligns_offsets(const rank_context& at) {
  symmetric_heap heap(at.make());
  const std::size_t small = heap.allocate(1);
  for (const std::size_t alignment : {std::size_t{1}, 4_KiB, 64_KiB, at.granule()}) {
    const std::size_t offset = heap.allocate(3000, nullptr, {.alignment = alignment});
    EXPECT_EQ(offset % std::max<std::size_t>(alignment, 512), 0u);
    EXPECT_GT(offset, small);
  }
  EXPECT_THAT(thrown_by([&] { (void)heap.allocate(1, nullptr, {.alignment = 3000}); }),
              HasSubstr("cannot align an allocation to 3000 bytes"));
  EXPECT_THAT(thrown_by([&] { (void)heap.allocate(1, nullptr, {.alignment = 2 * at.granule()}); }),
              HasSubstr(std::to_string(at.granule())));
  heap.check_invariants();
  heap.close();
}

void policies_choose_the_tier(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g, .device_limit = 2 * g});
  const std::size_t first = heap.allocate(g);
  EXPECT_EQ(tier_at(heap, first), tier::device);
  const std::size_t host = heap.allocate(g, nullptr, {.tiers = tier_policy::host_only});
  EXPECT_EQ(tier_at(heap, host), tier::host);
  const std::size_t second = heap.allocate(g);
  EXPECT_EQ(tier_at(heap, second), tier::device);
  const std::size_t tail = heap.allocate(g);
  EXPECT_EQ(tier_at(heap, tail), tier::host) << "device_limit is reached";
  const auto said = thrown_by_all(
      *at.ranks, [&] { (void)heap.allocate(g, nullptr, {.tiers = tier_policy::device_only}); });
  EXPECT_THAT(said,
              HasSubstr("out_of_memory: cannot allocate 2.0 MiB (2097152 bytes, device_only)"));
  EXPECT_THAT(said, HasSubstr("may take 0 B more"));
  EXPECT_THAT(said, HasSubstr("device_first"));
  heap.free(first);
  EXPECT_EQ(heap.allocate(g, nullptr, {.tiers = tier_policy::device_only}), first);
  heap.free(host);
  EXPECT_EQ(heap.allocate(g, nullptr, {.tiers = tier_policy::host_first}), host);
  const auto stats = heap.statistics();
  EXPECT_EQ(stats.num_ooms, 1);
  EXPECT_EQ(stats.allocation.all.current, 4);
  EXPECT_EQ(stats.allocated_bytes.all.current, static_cast<std::int64_t>(4 * g));
  EXPECT_EQ(stats.reserved_bytes.all.current, static_cast<std::int64_t>(4 * g));
  EXPECT_EQ(stats.host_tier_bytes, static_cast<std::int64_t>(2 * g));
  heap.check_invariants();
  heap.close();
}

void the_largest_buffer_spans_both_tiers(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g, .device_limit = 3 * g});
  const std::size_t small = heap.allocate(g / 2);
  const symmetric_request spanning{.may_span = true};
  const std::size_t large = heap.allocate(6 * g, nullptr, spanning);
  EXPECT_EQ(large, g / 2);
  EXPECT_EQ(tier_at(heap, large), tier::device);
  EXPECT_EQ(tier_at(heap, large + 6 * g - 1), tier::host);
  write(at, heap, large, 6 * g);
  expect_seen_by_all(at, heap, large, 6 * g);
  heap.free(large);
  heap.check_invariants();
  const std::size_t device = heap.allocate(g, nullptr, {.tiers = tier_policy::device_only});
  EXPECT_EQ(tier_at(heap, device + g - 1), tier::device) << "the parts are free by themselves";
  heap.free(device);
  EXPECT_EQ(heap.allocate(6 * g, nullptr, spanning), large) << "and together";
  // Without room in either tier nothing is left grown.
  const std::size_t size = heap.region().size();
  const auto said =
      thrown_by_all(*at.ranks, [&] { (void)heap.allocate(30 * g, nullptr, spanning); });
  EXPECT_THAT(said, HasSubstr("of addresses are left"));
  EXPECT_THAT(said, HasSubstr("raise the region's `reserve`"));
  EXPECT_EQ(heap.region().size(), size);
  heap.free(small);
  heap.check_invariants();
  heap.close();
}

void what_spans_may_end_in_the_tier_it_prefers(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g, .device_limit = g});
  heap.grow(tier::host, g);
  const std::size_t both = heap.allocate(2 * g, nullptr, {.may_span = true});
  EXPECT_EQ(both, 0u);
  EXPECT_EQ(tier_at(heap, both), tier::host);
  EXPECT_EQ(tier_at(heap, both + g), tier::device) << "what was missing fits there";
  heap.check_invariants();
  heap.close();
}

void what_may_lie_in_one_tier_alone_spans_none(const rank_context& at) {
  const std::size_t g = at.granule();
  for (const auto& [tiers, kind] : {std::pair{tier_policy::device_only, tier::device},
                                    std::pair{tier_policy::host_only, tier::host}}) {
    symmetric_heap heap(at.make(), {.growth_step = g, .device_limit = g, .host_limit = g});
    heap.grow(kind, g);
    heap.grow(kind == tier::device ? tier::host : tier::device, g);
    const symmetric_request request{.tiers = tiers, .may_span = true};
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { (void)heap.allocate(2 * g, nullptr, request); }),
                HasSubstr("out_of_memory"));
    const std::size_t fits = heap.allocate(g, nullptr, request);
    EXPECT_EQ(tier_at(heap, fits), kind);
    EXPECT_EQ(tier_at(heap, fits + g - 1), kind);
    heap.check_invariants();
    heap.close();
  }
}

void pools_have_segments_of_their_own(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g, .device_limit = 4 * g, .host_limit = 2 * g});
  const pool_id cold = heap.create_pool({.use_on_oom = true});
  const pool_id other = heap.create_pool();
  const std::size_t a = heap.allocate(g / 2);
  const std::size_t b = heap.allocate(g / 2, nullptr, {.pool = cold});
  EXPECT_EQ(b, g) << "a segment of its own, although the default pool has room";
  write(at, heap, a, g / 2);
  write(at, heap, b, g / 2);
  EXPECT_EQ(heap.migrate(cold, tier::host), g);
  EXPECT_EQ(tier_at(heap, a), tier::device);
  EXPECT_EQ(tier_at(heap, b), tier::host);
  expect_seen_by_all(at, heap, a, g / 2);
  expect_seen_by_all(at, heap, b, g / 2);
  EXPECT_EQ(heap.migrate(cold, tier::device), g);
  EXPECT_EQ(tier_at(heap, b), tier::device);
  expect_seen_by_all(at, heap, b, g / 2);
  EXPECT_THAT(thrown_by([&] { heap.release_pool(cold); }), HasSubstr("live allocations"));
  heap.free(b);
  // The default pool is full, and may use what is free in a pool that says so.
  std::vector<std::size_t> filled;
  while (heap.region().size() < 6 * g) {
    filled.push_back(heap.allocate(g, nullptr, {.tiers = tier_policy::device_first}));
  }
  const std::size_t borrowed = heap.allocate(g);
  EXPECT_EQ(borrowed, g);
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { (void)heap.allocate(g); }),
              HasSubstr("out_of_memory"));
  heap.free(borrowed);
  heap.release_pool(cold);
  heap.release_pool(other);
  EXPECT_EQ(heap.allocate(g), g / 2) << "the pool's segments are the default pool's now";
  EXPECT_THAT(thrown_by([&] { (void)heap.allocate(1, nullptr, {.pool = cold}); }),
              HasSubstr("no pool 1"));
  heap.check_invariants();
  heap.close();
}

void wrong_calls_name_what_is_wrong(const rank_context& at) {
  symmetric_heap heap(at.make());
  const std::size_t a = heap.allocate(4096);
  EXPECT_THAT(thrown_by([&] { heap.free(a + 512); }),
              HasSubstr("invalid_argument: cannot free offset 512: no live allocation"));
  heap.free(a);
  EXPECT_THAT(thrown_by([&] { heap.free(a); }), HasSubstr("no live allocation begins there"));
  EXPECT_THAT(thrown_by([&] { (void)heap.allocate(1_TiB); }), HasSubstr("raise `reserve`"));
  EXPECT_THAT(thrown_by([&] { heap.migrate(0, 1_TiB, tier::host); }), HasSubstr("cannot migrate"));
  heap.close();
  EXPECT_THAT(thrown_by([&] { (void)heap.allocate(1); }), HasSubstr("was closed"));
  heap.close();
}

// --- streams -------------------------------------------------------------------------------------

void another_stream_waits_for_what_used_the_block_before(const rank_context& at) {
  symmetric_heap heap(at.make());
  const native_stream one = at.on->create_stream(at.device);
  const native_stream two = at.on->create_stream(at.device);
  const native_stream three = at.on->create_stream(at.device);
  {
    const std::size_t a = heap.allocate(8192, one);
    heap.record_stream(a, two);
    stream_gate held(*at.on, two);
    heap.free(a);
    const std::size_t same = heap.allocate(4096, one);
    EXPECT_EQ(same, a) << "placement does not wait for streams";
    EXPECT_FALSE(at.on->idle(one)) << "the stream that gets it does: two has used it";
    const std::size_t next = heap.allocate(4096, three);
    EXPECT_EQ(next, a + 4096);
    EXPECT_FALSE(at.on->idle(three));
    held.open();
    at.on->synchronize(one);
    at.on->synchronize(three);
    heap.free(same);
    heap.free(next);
  }
  {
    const std::size_t a = heap.allocate(4096, one);
    const stream_gate held(*at.on, one);
    heap.free(a);
    EXPECT_EQ(heap.allocate(4096, one), a);
    at.on->synchronize(two);
    EXPECT_TRUE(at.on->idle(two));
    (void)heap.allocate(4096, two, {.alignment = 1_MiB});
    EXPECT_TRUE(at.on->idle(two)) << "bytes that nobody used: nothing to wait for";
  }
  heap.verify();
  heap.close();
  for (const native_stream stream : {one, two, three}) at.on->destroy_stream(stream);
}

void frees_under_a_capture_wait_for_its_end(const rank_context& at) {
  symmetric_heap heap(at.make());
  const native_stream stream = at.on->create_stream(at.device);
  const std::size_t a = heap.allocate(4096, stream);
  {
    scoped_capture capture(*at.on, stream);
    EXPECT_THAT(thrown_by([&] { (void)heap.allocate(1, stream); }), HasSubstr("captured"));
    heap.free(a);
    EXPECT_THAT(thrown_by([&] { heap.free(a); }), HasSubstr("it was freed"));
    EXPECT_NE(heap.allocate(4096), a) << "the graph may use it";
    // Freed, and still in use: as the caching allocator tells it.
    const allocator_statistics stats = heap.statistics();
    EXPECT_EQ(stats.allocated_bytes.all.current, 4096);
    EXPECT_EQ(stats.active_bytes.all.current, 8192);
    const segment_snapshot held = heap.snapshot().segments.at(0);
    EXPECT_EQ(held.allocated_bytes, 4096u);
    EXPECT_EQ(held.active_bytes, 8192u);
    EXPECT_EQ(held.blocks.at(0).state, block_state::active_pending_free);
    EXPECT_EQ(heap.report().requested_bytes, 4096u);
    capture.end();
  }
  EXPECT_EQ(heap.allocate(4096), a);
  EXPECT_EQ(heap.statistics().active_bytes.all.current, 8192);
  EXPECT_EQ(heap.statistics().active.all.current, 2);
  heap.check_invariants();
  heap.verify();
  heap.close();
  at.on->destroy_stream(stream);
}

// --- what it tells -------------------------------------------------------------------------------

void reports_and_snapshots_tell_what_is_there(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g, .device_limit = 2 * g});
  heap.record_history({});
  std::vector<trace_action> seen;
  const auto listening =
      heap.on_trace([&](const trace_entry& entry) { seen.push_back(entry.action); });
  const std::size_t a = heap.allocate(1000);
  const std::size_t b = heap.allocate(4 * g - 100, nullptr, {.may_span = true});
  heap.free(a);
  const heap_report all = heap.report();
  EXPECT_EQ(all.ranks.size(), static_cast<std::size_t>(at.ranks->size()));
  EXPECT_EQ(all.allocated_bytes, 4 * g);
  EXPECT_EQ(all.requested_bytes, 4 * g - 100);
  EXPECT_EQ(all.ranks[0].device_bytes, 2 * g);
  EXPECT_EQ(all.ranks[0].host_bytes + 2 * g, heap.region().size());
  EXPECT_EQ(all.free_bytes, heap.region().size() - 4 * g);
  EXPECT_THAT(all.text(), HasSubstr("8.0 MiB allocated"));

  const allocator_snapshot now = heap.snapshot();
  std::size_t covered = 0, live = 0, requested = 0;
  for (const segment_snapshot& segment : now.segments) {
    EXPECT_EQ(segment.at, address_of(heap.local(covered)));
    for (const block_snapshot& block : segment.blocks) covered += block.bytes;
    live += segment.allocated_bytes;
    requested += segment.requested_bytes;
  }
  EXPECT_EQ(covered, heap.region().size());
  EXPECT_EQ(live, 4 * g);
  EXPECT_EQ(requested, 4 * g - 100) << "whatever the block's parts";
  EXPECT_EQ(now.settings[0],
            (std::pair<std::string, std::string>("rank", std::to_string(at.ranks->rank().value))));
  EXPECT_EQ(from_pickle(to_pickle(now)).segments, now.segments);
  EXPECT_THAT(seen, ::testing::ElementsAre(trace_action::segment_map, trace_action::alloc,
                                           trace_action::segment_map, trace_action::segment_map,
                                           trace_action::alloc, trace_action::free_requested,
                                           trace_action::free_completed));
  EXPECT_EQ(now.device_traces[static_cast<std::size_t>(at.device.value)].size(), seen.size());
  heap.free(b);
  heap.close();
}

void snapshots_tell_where_blocks_were_allocated(const rank_context& at) {
  symmetric_heap heap(at.make());
  const std::size_t before = heap.allocate(512);
  heap.record_history({.level = history_level::alloc, .stacks = true});
  const std::size_t after = heap.allocate(512);
  const segment_snapshot held = heap.snapshot().segments.at(0);
  EXPECT_TRUE(held.blocks.at(0).frames.empty());
  EXPECT_FALSE(held.blocks.at(1).frames.empty());
  heap.free(before);
  heap.free(after);
  heap.record_history({.level = history_level::off});
  (void)heap.allocate(1024);
  EXPECT_TRUE(heap.snapshot().segments.at(0).blocks.at(0).frames.empty());
  heap.close();
}

/// What has to grow in both tiers and cannot in one ends where it began, also in its history.
void a_growth_that_is_given_back_leaves_the_history_even(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make({.max_segments = 2}), {.growth_step = g, .device_limit = 2 * g});
  (void)heap.allocate(g);
  std::size_t mapped = heap.region().size();
  const auto listening = heap.on_trace([&](const trace_entry& entry) {
    if (entry.action == trace_action::segment_map) mapped += entry.bytes;
    if (entry.action == trace_action::segment_unmap) mapped -= entry.bytes;
  });
  EXPECT_THAT(
      thrown_by_all(*at.ranks, [&] { (void)heap.allocate(3 * g, nullptr, {.may_span = true}); }),
      HasSubstr("out_of_memory"));
  EXPECT_EQ(heap.region().size(), g);
  EXPECT_EQ(mapped, g);
  heap.close();
}

void a_trim_that_is_refused_leaves_the_history_even(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g});
  heap.free(heap.allocate(g));
  std::size_t mapped = heap.region().size();
  const auto listening = heap.on_trace([&](const trace_entry& entry) {
    if (entry.action == trace_action::segment_map) mapped += entry.bytes;
    if (entry.action == trace_action::segment_unmap) mapped -= entry.bytes;
  });
  {
    const auto refusing = heap.region().observe(
        {.before_change = [](const region_change&) { throw invalid_argument("not now"); }});
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { heap.trim(); }), HasSubstr("not now"));
  }
  EXPECT_EQ(mapped, g);
  EXPECT_EQ(heap.trim(), g);
  EXPECT_EQ(mapped, 0u);
  heap.close();
}

void discarded_segments_are_not_handed_out(const rank_context& at) {
  symmetric_region region = at.make();
  region.grow(tier::device, at.granule());
  region.discard(contents::drop);
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { symmetric_heap(std::move(region)); }),
              HasSubstr("invalid_argument: 2.0 MiB at 0 B of the region are discarded"));
}

void buffers_are_typed_and_free_themselves(const rank_context& at) {
  symmetric_heap heap(at.make());
  {
    symmetric_buffer<std::uint32_t> counts(heap, 1000);
    EXPECT_EQ(counts.size(), 1000u);
    EXPECT_EQ(counts.bytes(), 4000u);
    EXPECT_EQ(heap.size_of(counts.offset()), 4000u);
    EXPECT_EQ(counts.peer(at.ranks->rank()), counts.local());
    symmetric_buffer<std::uint32_t> moved = std::move(counts);
    EXPECT_FALSE(counts);
    EXPECT_EQ(counts.size(), 0u);
    EXPECT_TRUE(counts.elements().empty()) << "one that was moved from can be asked";
    counts = symmetric_buffer<std::uint32_t>(heap, 5);
    EXPECT_EQ(heap.statistics().allocation.all.current, 2);
    const symmetric_buffer<double> empty(heap, 0);
    EXPECT_EQ(empty.bytes(), 0u);
    EXPECT_THAT(thrown_by([&] { symmetric_buffer<double>(heap, ~std::size_t{0} / 4); }),
                HasSubstr("the size overflows"));
  }
  EXPECT_EQ(heap.statistics().allocation.all.current, 0);
  symmetric_buffer<char> late(heap, 10);
  heap.verify();
  heap.close();
}

void random_calls_place_alike(const rank_context& at) {
  run_random_heap(at, 600, 17);
}

}  // namespace

const std::vector<symmetric_case>& heap_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(grows_when_full_and_reuses_what_is_freed),
      EVMM_CASE(aligns_offsets),
      EVMM_CASE(policies_choose_the_tier),
      EVMM_CASE(the_largest_buffer_spans_both_tiers),
      EVMM_CASE(what_spans_may_end_in_the_tier_it_prefers),
      EVMM_CASE(what_may_lie_in_one_tier_alone_spans_none),
      EVMM_CASE(pools_have_segments_of_their_own),
      EVMM_CASE(wrong_calls_name_what_is_wrong),
      EVMM_CASE(another_stream_waits_for_what_used_the_block_before),
      EVMM_CASE(frees_under_a_capture_wait_for_its_end),
      EVMM_CASE(reports_and_snapshots_tell_what_is_there),
      EVMM_CASE(snapshots_tell_where_blocks_were_allocated),
      EVMM_CASE(a_growth_that_is_given_back_leaves_the_history_even),
      EVMM_CASE(a_trim_that_is_refused_leaves_the_history_even),
      EVMM_CASE(discarded_segments_are_not_handed_out),
      EVMM_CASE(buffers_are_typed_and_free_themselves),
      EVMM_CASE(random_calls_place_alike),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
