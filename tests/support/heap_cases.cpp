// SPDX-License-Identifier: Apache-2.0
#include "tests/support/heap_cases.hpp"

#include "tests/support/fault_driver.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <string>
#include <utility>
#include <vector>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

/// What `call` throws, the same text on every rank.
template <class Call>
std::string thrown_everywhere(const rank_context& at, Call&& call) {
  const std::string said = thrown_by(call);
  for (const auto& other : at.ranks->all_gather(std::as_bytes(std::span{said}))) {
    EXPECT_EQ(std::string(reinterpret_cast<const char*>(other.data()), other.size()), said)
        << "all ranks throw the same error";
  }
  return said;
}

address address_of(const std::byte* at) {
  return reinterpret_cast<address>(at);
}

std::uint64_t seed_of(std::size_t offset, rank_id rank) {
  return offset * 64 + static_cast<std::uint64_t>(rank.value);
}

/// Writes a block's pattern on this rank.
void write(const rank_context& at, const symmetric_heap& heap, std::size_t offset,
           std::size_t bytes) {
  write_pattern(*at.on, address_of(heap.local(offset)), bytes, seed_of(offset, at.ranks->rank()),
                at.device);
}

/// Every rank finds every node peer's pattern.
void expect_seen_by_all(const rank_context& at, const symmetric_heap& heap, std::size_t offset,
                        std::size_t bytes) {
  at.ranks->barrier("test: written");
  for (const rank_id peer : at.ranks->node_ranks()) {
    EXPECT_TRUE(holds_pattern(*at.on, address_of(heap.peer(peer, offset)), bytes,
                              seed_of(offset, peer), at.device))
        << "rank " << peer.value << " at offset " << offset;
  }
  at.ranks->barrier("test: read");
}

tier tier_at(const symmetric_heap& heap, std::size_t offset) {
  for (const segment& held : heap.region().segments(heap.region().rank())) {
    if (offset >= held.offset && offset < held.offset + held.bytes) return held.where.kind;
  }
  ADD_FAILURE() << "nothing is backed at " << offset;
  return tier::device;
}

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
  const auto said = thrown_everywhere(
      at, [&] { (void)heap.allocate(g, nullptr, {.tiers = tier_policy::device_only}); });
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
  const auto said = thrown_everywhere(at, [&] { (void)heap.allocate(30 * g, nullptr, spanning); });
  EXPECT_THAT(said, HasSubstr("of addresses are left"));
  EXPECT_THAT(said, HasSubstr("raise the region's `reserve`"));
  EXPECT_EQ(heap.region().size(), size);
  heap.free(small);
  heap.check_invariants();
  heap.close();
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
  EXPECT_THAT(thrown_everywhere(at, [&] { (void)heap.allocate(g); }), HasSubstr("out_of_memory"));
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
    capture.end();
  }
  EXPECT_EQ(heap.allocate(4096), a);
  heap.check_invariants();
  heap.verify();
  heap.close();
  at.on->destroy_stream(stream);
}

// --- changes -------------------------------------------------------------------------------------

void any_rank_may_ask_for_growth(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.device_limit = 4 * g});
  const bool last = at.ranks->rank().value == at.ranks->size() - 1;
  if (last) heap.request_growth(tier::device, 2 * g);
  EXPECT_EQ(heap.region().size(), 0u) << "nothing happens before all arrive";
  heap.verify();
  EXPECT_EQ(heap.region().size(), 2 * g);
  if (last) heap.request_growth(tier::device, 20 * g);
  heap.verify();
  EXPECT_EQ(heap.region().size(), 2 * g) << "no room, and no error";
  const grown more = heap.grow(tier::host, g);
  EXPECT_EQ(more.offset, 2 * g);
  heap.check_invariants();
  heap.close();
}

void trim_gives_back_free_segments_at_the_end(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g});
  std::vector<std::size_t> blocks;
  for (int i = 0; i < 5; ++i) blocks.push_back(heap.allocate(g));
  heap.free(blocks[4]);
  heap.free(blocks[3]);
  heap.free(blocks[1]);
  EXPECT_EQ(heap.trim(3 * g), 0u);
  EXPECT_EQ(heap.trim(2 * g), g);
  EXPECT_EQ(heap.trim(), g) << "a free segment in the middle stays";
  EXPECT_EQ(heap.region().size(), 3 * g);
  EXPECT_EQ(heap.region().statistics().cached_bytes, 0u);
  EXPECT_EQ(heap.allocate(g), g);
  heap.free(g);
  heap.free(blocks[0]);
  heap.free(blocks[2]);
  EXPECT_EQ(heap.trim(), 3 * g);
  EXPECT_EQ(heap.region().size(), 0u);
  EXPECT_EQ(heap.allocate(g), 0u);
  heap.check_invariants();
  heap.close();
}

void cold_ranges_move_and_come_back(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g});
  std::vector<std::size_t> blocks;
  for (int i = 0; i < 3; ++i) {
    blocks.push_back(heap.allocate(
        g, nullptr, {.tiers = i == 2 ? tier_policy::device_only : tier_policy::device_first}));
    write(at, heap, blocks.back(), g);
  }
  EXPECT_EQ(heap.migrate(blocks[1], g, tier::host), g);
  EXPECT_EQ(tier_at(heap, blocks[0]), tier::device);
  EXPECT_EQ(tier_at(heap, blocks[1]), tier::host);
  EXPECT_EQ(heap.migrate(blocks[1], g, tier::host), 0u);
  const auto said = thrown_everywhere(at, [&] { heap.migrate(g, g + 512, tier::host); });
  EXPECT_THAT(said, HasSubstr("the device_only allocation of 2097152 bytes at offset 4194304"));
  EXPECT_EQ(heap.migrate(0, 3 * g, tier::host), 2 * g) << "asked for the whole of it";
  EXPECT_EQ(heap.migrate(0, 3 * g, tier::device), 3 * g);
  for (const std::size_t block : blocks) expect_seen_by_all(at, heap, block, g);
  heap.check_invariants();
  heap.close();
}

void compaction_keeps_blocks_and_makes_few_segments(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g});
  const pool_id pool = heap.create_pool();
  std::vector<std::size_t> blocks;
  for (int i = 0; i < 6; ++i) {
    blocks.push_back(heap.allocate(g, nullptr, {.pool = i < 4 ? pool_id{} : pool}));
    write(at, heap, blocks.back(), g);
  }
  heap.migrate(blocks[0], g, tier::host);
  EXPECT_EQ(heap.compact(), 3u) << "host, device, and the pool's";
  for (const std::size_t block : blocks) expect_seen_by_all(at, heap, block, g);
  heap.free(blocks[1]);
  heap.free(blocks[4]);
  EXPECT_EQ(heap.allocate(g), blocks[1]);
  EXPECT_EQ(heap.allocate(g, nullptr, {.pool = pool}), blocks[4]);
  heap.check_invariants();
  heap.close();
}

void a_region_that_is_backed_already_is_used(const rank_context& at) {
  const std::size_t g = at.granule();
  auto region = at.make();
  region.grow(tier::device, g);
  region.grow(at.ranks->rank() == rank_id{0} ? tier::host : tier::device, g);
  symmetric_heap heap(std::move(region), {.device_limit = g});
  EXPECT_EQ(heap.allocate(g / 2), 0u);
  const std::size_t mixed = heap.allocate(g);
  EXPECT_EQ(mixed, g) << "where one rank has host memory, it is host memory";
  EXPECT_THAT(
      thrown_everywhere(
          at, [&] { (void)heap.allocate(g, nullptr, {.tiers = tier_policy::device_only}); }),
      HasSubstr("out_of_memory"));
  heap.check_invariants();
  heap.close();
}

// --- divergence ----------------------------------------------------------------------------------

void the_first_call_that_differs_is_named(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  const rank_id odd{at.ranks->size() - 1};
  const bool mine = at.ranks->rank() == odd;
  symmetric_heap heap(at.make(), {.growth_step = 4 * at.granule()});
  const std::size_t a = heap.allocate(4096);
  (void)heap.allocate(mine ? 8192 : 4096, nullptr, {.alignment = 1024});
  (void)heap.allocate(512);
  const auto said = thrown_everywhere(at, [&] { heap.verify(); });
  EXPECT_THAT(said, HasSubstr("differ from call 2: rank 0: allocate 4096 bytes aligned to 1024, "
                              "device_first, pool 0 -> offset 4096; rank " +
                              std::to_string(odd.value) + ": allocate 8192 bytes"));
  EXPECT_THAT(said, HasSubstr("every_call"));
  // It is found at growth as well, before anything is grown.
  const std::uint64_t epoch = heap.region().epoch();
  EXPECT_THAT(thrown_everywhere(at, [&] { (void)heap.allocate(8 * at.granule()); }),
              HasSubstr("differ from call 2"));
  EXPECT_EQ(heap.region().epoch(), epoch);
  heap.free(a);
  heap.close();

  symmetric_heap counted(at.make());
  (void)counted.allocate(1);
  if (mine) (void)counted.allocate(2);
  EXPECT_THAT(thrown_everywhere(at, [&] { counted.verify(); }),
              HasSubstr("differ from call 2: rank 0: has made only 1 calls; rank " +
                        std::to_string(odd.value) + ": allocate 2 bytes"));
  counted.close();

  symmetric_heap forgetful(at.make(), {.calls_kept = 4});
  (void)forgetful.allocate(512);
  (void)forgetful.allocate(mine ? 1 : 2);
  for (int i = 0; i < 8; ++i) (void)forgetful.allocate(512);
  EXPECT_THAT(thrown_everywhere(at, [&] { forgetful.verify(); }),
              HasSubstr("differ, at or before call 7"));
  forgetful.close();
}

void every_call_is_compared_when_asked_for(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  symmetric_heap heap(at.make(), {.check = divergence_check::every_call});
  const std::size_t a = heap.allocate(4096);
  const std::size_t b = heap.allocate(4096);
  heap.record_stream(a, nullptr);
  const auto said =
      thrown_everywhere(at, [&] { heap.free(at.ranks->rank() == rank_id{0} ? a : b); });
  EXPECT_THAT(said,
              HasSubstr("differ from call 4: rank 0: free offset 0; rank 1: free offset 4096"));
  heap.close();
}

void options_that_differ_are_refused(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  const std::size_t step = at.ranks->rank() == rank_id{1} ? 8_MiB : 4_MiB;
  const auto said =
      thrown_everywhere(at, [&] { symmetric_heap(at.make(), {.growth_step = step}); });
  EXPECT_THAT(said, HasSubstr("rank 0 gave growth_step 4194304"));
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
  const std::size_t b = heap.allocate(4 * g, nullptr, {.may_span = true});
  heap.free(a);
  const heap_report all = heap.report();
  EXPECT_EQ(all.ranks.size(), static_cast<std::size_t>(at.ranks->size()));
  EXPECT_EQ(all.allocated_bytes, 4 * g);
  EXPECT_EQ(all.requested_bytes, 4 * g);
  EXPECT_EQ(all.ranks[0].device_bytes, 2 * g);
  EXPECT_EQ(all.ranks[0].host_bytes + 2 * g, heap.region().size());
  EXPECT_EQ(all.free_bytes, heap.region().size() - 4 * g);
  EXPECT_THAT(all.text(), HasSubstr("8.0 MiB allocated"));

  const allocator_snapshot now = heap.snapshot();
  std::size_t covered = 0, live = 0;
  for (const segment_snapshot& segment : now.segments) {
    EXPECT_EQ(segment.at, address_of(heap.local(covered)));
    for (const block_snapshot& block : segment.blocks) covered += block.bytes;
    live += segment.allocated_bytes;
  }
  EXPECT_EQ(covered, heap.region().size());
  EXPECT_EQ(live, 4 * g);
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
      EVMM_CASE(pools_have_segments_of_their_own),
      EVMM_CASE(wrong_calls_name_what_is_wrong),
      EVMM_CASE(another_stream_waits_for_what_used_the_block_before),
      EVMM_CASE(frees_under_a_capture_wait_for_its_end),
      EVMM_CASE(any_rank_may_ask_for_growth),
      EVMM_CASE(trim_gives_back_free_segments_at_the_end),
      EVMM_CASE(cold_ranges_move_and_come_back),
      EVMM_CASE(compaction_keeps_blocks_and_makes_few_segments),
      EVMM_CASE(a_region_that_is_backed_already_is_used),
      EVMM_CASE(the_first_call_that_differs_is_named),
      EVMM_CASE(every_call_is_compared_when_asked_for),
      EVMM_CASE(options_that_differ_are_refused),
      EVMM_CASE(reports_and_snapshots_tell_what_is_there),
      EVMM_CASE(buffers_are_typed_and_free_themselves),
      EVMM_CASE(random_calls_place_alike),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
