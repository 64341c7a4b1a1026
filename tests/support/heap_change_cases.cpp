// SPDX-License-Identifier: Apache-2.0
#include "tests/support/heap_cases.hpp"
#include "tests/support/heap_checks.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

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
  if (last) heap.request_growth(tier::device, static_cast<std::size_t>(-1));
  heap.verify();
  EXPECT_EQ(heap.region().size(), 2 * g) << "nor is there for all that can be asked for";
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
  const auto said = thrown_by_all(*at.ranks, [&] { heap.migrate(g, g + 512, tier::host); });
  EXPECT_THAT(said, HasSubstr("the device_only allocation of 2097152 bytes at offset 4194304"));
  EXPECT_EQ(heap.migrate(0, 3 * g, tier::host), 2 * g) << "asked for the whole of it";
  EXPECT_EQ(heap.migrate(0, 3 * g, tier::device), 3 * g);
  for (const std::size_t block : blocks) expect_seen_by_all(at, heap, block, g);
  heap.check_invariants();
  heap.close();
}

void a_pool_moves_with_what_lies_in_several_of_its_segments(const rank_context& at) {
  const std::size_t g = at.granule();
  symmetric_heap heap(at.make(), {.growth_step = g});
  const pool_id pool = heap.create_pool();
  heap.grow(tier::device, g, pool);
  heap.grow(tier::device, g, pool);
  const std::size_t both =
      heap.allocate(2 * g, nullptr, {.tiers = tier_policy::device_only, .pool = pool});
  heap.grow(tier::device, g);
  heap.grow(tier::device, g, pool);
  write(at, heap, both, 2 * g);
  EXPECT_EQ(heap.migrate(pool, tier::host), 3 * g);
  EXPECT_EQ(tier_at(heap, both + g), tier::host);
  EXPECT_EQ(tier_at(heap, 2 * g), tier::device) << "another pool's";
  expect_seen_by_all(at, heap, both, 2 * g);
  heap.check_invariants();
  heap.close();
}

void changes_keep_to_the_limits(const rank_context& at) {
  const std::size_t g = at.granule();
  const std::size_t least = at.ranks->rank().value == at.ranks->size() - 1 ? 2 * g : 3 * g;
  symmetric_heap heap(at.make(), {.device_limit = least, .host_limit = 2 * g});
  for (const tier kind : {tier::device, tier::host, tier::host}) heap.grow(kind, g);
  const std::string rank = std::to_string(at.ranks->size() - 1);
  auto said = thrown_by_all(*at.ranks, [&] { heap.grow(tier::device, 2 * g); });
  EXPECT_THAT(said, HasSubstr("out_of_memory: cannot take 4.0 MiB more of DEVICE"));
  EXPECT_THAT(said, HasSubstr("rank " + rank + " may take 2.0 MiB"));
  EXPECT_THAT(said, HasSubstr("or raise device_limit"));
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { heap.grow(tier::host, g); }), HasSubstr("host_limit"));
  said = thrown_by_all(*at.ranks, [&] { heap.migrate(0, 3 * g, tier::device); });
  EXPECT_THAT(said, HasSubstr("cannot take 4.0 MiB more of DEVICE"));
  EXPECT_EQ(heap.migrate(g, g, tier::device), g);
  EXPECT_EQ(heap.migrate(0, 2 * g, tier::device), 0u);
  EXPECT_EQ(heap.migrate(512, 0, tier::host), 0u) << "no bytes take no room";
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
      thrown_by_all(*at.ranks,
                    [&] { (void)heap.allocate(g, nullptr, {.tiers = tier_policy::device_only}); }),
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
  const auto said = thrown_by_all(*at.ranks, [&] { heap.verify(); });
  EXPECT_THAT(said, HasSubstr("differ from call 2: rank 0: allocate 4096 bytes aligned to 1024, "
                              "device_first, pool 0 -> offset 4096; rank " +
                              std::to_string(odd.value) + ": allocate 8192 bytes"));
  EXPECT_THAT(said, HasSubstr("every_call"));
  // It is found at growth as well, before anything is grown.
  const std::uint64_t epoch = heap.region().epoch();
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { (void)heap.allocate(8 * at.granule()); }),
              HasSubstr("differ from call 2"));
  EXPECT_EQ(heap.region().epoch(), epoch);
  heap.free(a);
  heap.close();

  symmetric_heap counted(at.make());
  (void)counted.allocate(1);
  if (mine) (void)counted.allocate(2);
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { counted.verify(); }),
              HasSubstr("differ from call 2: rank 0: has made only 1 calls; rank " +
                        std::to_string(odd.value) + ": allocate 2 bytes"));
  counted.close();

  symmetric_heap forgetful(at.make(), {.calls_kept = 4});
  (void)forgetful.allocate(512);
  (void)forgetful.allocate(mine ? 1 : 2);
  for (int i = 0; i < 8; ++i) (void)forgetful.allocate(512);
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { forgetful.verify(); }),
              HasSubstr("differ, at or before call 7"));
  forgetful.close();

  symmetric_heap blank(at.make(), {.calls_kept = 0});
  (void)blank.allocate(512);
  (void)blank.allocate(mine ? 1 : 2);
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { blank.verify(); }),
              HasSubstr("differ, at or before call 3: rank 0: does not remember it"));
  blank.close();
}

/// The arguments are equal, and what came of them is not: one rank freed under a capture.
void the_first_call_that_gave_something_else_is_named(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  const rank_id odd{at.ranks->size() - 1};
  symmetric_heap heap(at.make());
  const native_stream stream = at.on->create_stream(at.device);
  const std::size_t a = heap.allocate(4096, stream);
  std::optional<scoped_capture> capture;
  if (at.ranks->rank() == odd) capture.emplace(*at.on, stream);
  heap.free(a);
  (void)heap.allocate(4096);
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { heap.verify(); }),
              HasSubstr("differ from call 3: rank 0: allocate 4096 bytes aligned to 512, "
                        "device_first, pool 0 -> offset 0; rank " +
                        std::to_string(odd.value) +
                        ": allocate 4096 bytes aligned to 512, "
                        "device_first, pool 0 -> offset 4096"));
  (void)heap.allocate(512);
  (void)heap.allocate(1024);
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { heap.verify(); }),
              HasSubstr("differ from call 3: rank 0: allocate 4096 bytes"));
  capture.reset();
  heap.close();
  at.on->destroy_stream(stream);
}

/// What was freed under a capture is in use on the rank that captures.
void a_trim_that_would_differ_is_told_to_all(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  const std::size_t g = at.granule();
  const rank_id odd{at.ranks->size() - 1};
  symmetric_heap heap(at.make(), {.growth_step = g});
  const native_stream stream = at.on->create_stream(at.device);
  (void)heap.allocate(g);
  const std::size_t last = heap.allocate(g, stream);
  std::optional<scoped_capture> capture;
  if (at.ranks->rank() == odd) capture.emplace(*at.on, stream);
  heap.free(last);
  EXPECT_THAT(
      thrown_by_all(*at.ranks, [&] { heap.trim(); }),
      HasSubstr("differ from call 4: rank 0: trim of " + std::to_string(g) +
                " bytes, 0 kept; rank " + std::to_string(odd.value) + ": trim of 0 bytes, 0 kept"));
  EXPECT_EQ(heap.region().size(), 2 * g);
  capture.reset();
  heap.close();
  at.on->destroy_stream(stream);
}

/// What was freed stays on the device no longer than the capture lasts under which it was.
void what_was_freed_under_a_capture_keeps_nothing_back_after_it(const rank_context& at) {
  const std::size_t g = at.granule();
  const rank_id odd{at.ranks->size() - 1};
  symmetric_heap heap(at.make(), {.growth_step = g});
  const native_stream stream = at.on->create_stream(at.device);
  std::optional<scoped_capture> capture;
  const auto free_half = [&](bool captured) {
    const std::size_t half =
        heap.allocate(g / 2, stream, {.tiers = tier_policy::device_only, .alignment = g / 2});
    if (captured) capture.emplace(*at.on, stream);
    heap.free(half);
  };
  (void)heap.allocate(g / 2);
  free_half(true);
  capture.reset();
  EXPECT_EQ(heap.migrate(0, g / 2, tier::host), g);
  EXPECT_EQ(heap.migrate(0, g, tier::device), g);
  if (at.ranks->size() > 1) {
    free_half(at.ranks->rank() == odd);
    const std::string move = "migrate " + std::to_string(g / 2) + " bytes at offset 0 to HOST_NUMA";
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { heap.migrate(0, g / 2, tier::host); }),
                HasSubstr("rank 0: " + move + "; rank " + std::to_string(odd.value) + ": " + move +
                          ", which is refused"));
    capture.reset();
  }
  heap.close();
  at.on->destroy_stream(stream);
}

/// One rank finds the heap full, where the others do not: they meet it in calls of other kinds.
void ranks_that_meet_in_different_calls_learn_where_they_parted(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  const bool odd = at.ranks->rank().value == at.ranks->size() - 1;
  const std::size_t g = at.granule();
  const std::vector<std::function<void(symmetric_heap&)>> calls = {
      [](symmetric_heap& heap) { heap.verify(); },
      [](symmetric_heap& heap) { (void)heap.report(); },
      [](symmetric_heap& heap) { heap.trim(); },
      [g](symmetric_heap& heap) { heap.grow(tier::device, g); },
      [g](symmetric_heap& heap) { heap.migrate(0, g, tier::host); },
      [](symmetric_heap& heap) { heap.migrate(pool_id{}, tier::host); },
      [](symmetric_heap& heap) { heap.compact(); },
  };
  for (const auto& call : calls) {
    symmetric_heap heap(at.make(), {.growth_step = g});
    (void)heap.allocate(g / 2);
    if (odd) (void)heap.allocate(512);
    const auto said = thrown_by_all(*at.ranks, [&] {
      if (odd) (void)heap.allocate(g / 2);
      call(heap);
    });
    EXPECT_THAT(said, HasSubstr("invalid_argument: the ranks' calls of the symmetric heap differ "
                                "from call 2: rank 0: "));
    EXPECT_THAT(said, HasSubstr(": allocate 512 bytes"));
    heap.close();
  }
}

void every_call_is_compared_when_asked_for(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  symmetric_heap heap(at.make(), {.check = divergence_check::every_call});
  const std::size_t a = heap.allocate(4096);
  const std::size_t b = heap.allocate(4096);
  heap.record_stream(a, nullptr);
  const auto said =
      thrown_by_all(*at.ranks, [&] { heap.free(at.ranks->rank() == rank_id{0} ? a : b); });
  EXPECT_THAT(said,
              HasSubstr("differ from call 4: rank 0: free offset 0; rank 1: free offset 4096"));
  heap.close();
}

void options_that_differ_are_refused(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  const std::size_t step = at.ranks->rank() == rank_id{1} ? 8_MiB : 4_MiB;
  const auto said =
      thrown_by_all(*at.ranks, [&] { symmetric_heap(at.make(), {.growth_step = step}); });
  EXPECT_THAT(said, HasSubstr("rank 0 gave growth_step 4194304"));
}

}  // namespace

const std::vector<symmetric_case>& heap_change_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(any_rank_may_ask_for_growth),
      EVMM_CASE(trim_gives_back_free_segments_at_the_end),
      EVMM_CASE(cold_ranges_move_and_come_back),
      EVMM_CASE(a_pool_moves_with_what_lies_in_several_of_its_segments),
      EVMM_CASE(changes_keep_to_the_limits),
      EVMM_CASE(compaction_keeps_blocks_and_makes_few_segments),
      EVMM_CASE(a_region_that_is_backed_already_is_used),
      EVMM_CASE(the_first_call_that_differs_is_named),
      EVMM_CASE(the_first_call_that_gave_something_else_is_named),
      EVMM_CASE(a_trim_that_would_differ_is_told_to_all),
      EVMM_CASE(what_was_freed_under_a_capture_keeps_nothing_back_after_it),
      EVMM_CASE(ranks_that_meet_in_different_calls_learn_where_they_parted),
      EVMM_CASE(every_call_is_compared_when_asked_for),
      EVMM_CASE(options_that_differ_are_refused),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
