// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_choice.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/patterns.hpp"

#include <evmm/elastic_region.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

// What elastic_region promises, on any driver: instantiated for the host driver in tests/unit and
// for CUDA in tests/gpu.

namespace evmm::test {

using namespace evmm::units;

class region_contract : public ::testing::TestWithParam<driver_choice> {
 protected:
  void SetUp() override {
    std::string why_not;
    on = GetParam().make(&why_not);
    if (!on) GTEST_SKIP() << why_not;
    granule = on->granularity(memory_location::on(device_id{0}));
  }

  elastic_region make_region(std::size_t granules = 64, region_options options = {}) {
    options.reserve = granules * granule;
    return {on, options};
  }
  address at(const elastic_region& region, std::size_t offset = 0) const {
    return reinterpret_cast<address>(region.data()) + offset;
  }

  std::shared_ptr<driver> on;
  std::size_t granule = 0;
};

TEST_P(region_contract, grows_by_segments_of_either_tier_at_fixed_addresses) {
  auto region = make_region();
  std::byte* const base = region.data();
  EXPECT_EQ(region.size(), 0u);
  const grown first = region.grow(tier::device, granule);
  const grown second = region.grow(tier::host, 3 * granule - 1);
  EXPECT_EQ(first.offset, 0u);
  EXPECT_EQ(first.bytes, granule);
  EXPECT_EQ(second.offset, granule);
  EXPECT_EQ(second.bytes, 3 * granule) << "rounded up to the granularity";
  EXPECT_EQ(region.size(), 4 * granule);
  EXPECT_EQ(region.epoch(), 2u);
  EXPECT_EQ(region.data(), base);
  const auto segments = region.segments();
  ASSERT_EQ(segments.size(), 2u);
  EXPECT_EQ(segments[0].where, memory_location::on(device_id{0}));
  EXPECT_EQ(segments[1].where.kind, tier::host);
  EXPECT_EQ(segments[1].offset, granule);
  ASSERT_TRUE(region.placement());
  EXPECT_EQ(segments[1].where.index, region.placement()->nodes.front().value);
  const auto held = region.statistics();
  EXPECT_EQ(held.device_bytes, granule);
  EXPECT_EQ(held.host_bytes, 3 * granule);
  EXPECT_EQ(held.grows, 2u);
  EXPECT_EQ(held.handles_created, 2u);
}

TEST_P(region_contract, contents_survive_growth_and_span_tiers) {
  auto region = make_region();
  region.grow(tier::device, granule);
  write_pattern(*on, at(region), granule, 1);
  region.grow(tier::host, granule);
  EXPECT_TRUE(holds_pattern(*on, at(region), granule, 1));
  write_pattern(*on, at(region), 2 * granule, 2);
  EXPECT_TRUE(holds_pattern(*on, at(region), 2 * granule, 2)) << "across the tier boundary";
}

TEST_P(region_contract, shrink_drops_whole_segments_and_keeps_their_handles) {
  auto region = make_region();
  region.grow(tier::device, granule);
  region.grow(tier::device, 2 * granule);
  EXPECT_EQ(region.shrink(granule), 0u) << "the last segment does not fit";
  EXPECT_EQ(region.epoch(), 2u) << "nothing changed";
  EXPECT_EQ(region.shrink(2 * granule), 2 * granule);
  EXPECT_EQ(region.size(), granule);
  EXPECT_EQ(region.statistics().cached_bytes, 2 * granule);
  region.grow(tier::device, 2 * granule);
  EXPECT_EQ(region.statistics().handles_reused, 1u);
  EXPECT_EQ(region.statistics().handles_created, 2u);
  EXPECT_EQ(region.statistics().cached_bytes, 0u);
}

TEST_P(region_contract, the_cache_has_a_limit_and_can_be_trimmed) {
  auto region = make_region(64, {.cache_limit = 3 * granule});
  for (int i = 0; i < 4; ++i) region.grow(tier::device, granule);
  region.shrink(4 * granule);
  EXPECT_EQ(region.statistics().cached_bytes, 3 * granule);
  EXPECT_EQ(region.statistics().handles_released, 1u);
  EXPECT_EQ(region.trim_cache(), 3 * granule);
  EXPECT_EQ(region.statistics().cached_bytes, 0u);
}

TEST_P(region_contract, migrate_keeps_contents_and_address_both_ways) {
  auto region = make_region();
  for (int i = 0; i < 3; ++i) region.grow(tier::device, 2 * granule);
  write_pattern(*on, at(region), region.size(), 3);
  region.migrate(1, tier::host);
  EXPECT_EQ(region.segments()[1].where.kind, tier::host);
  EXPECT_TRUE(holds_pattern(*on, at(region), region.size(), 3));
  region.migrate(1, tier::device);
  EXPECT_EQ(region.segments()[1].where.kind, tier::device);
  EXPECT_TRUE(holds_pattern(*on, at(region), region.size(), 3));
  const auto epoch = region.epoch();
  region.migrate(1, tier::device);
  EXPECT_EQ(region.epoch(), epoch) << "already there";
  EXPECT_EQ(region.statistics().migrations, 2u);
  EXPECT_EQ(region.statistics().bytes_copied, 4 * granule);
}

TEST_P(region_contract, a_deferred_migration_waits_for_its_streams_and_blocks_nobody) {
  auto region = make_region();
  region.grow(tier::device, granule);
  region.grow(tier::device, granule);
  const native_stream stream = on->create_stream({0});
  pending_change moved;
  {
    stream_gate gate(*on, stream);
    on->fill(at(region), std::byte{0x5a}, granule, stream);
    moved = region.migrate_later(0, tier::host, {.streams = {&stream, 1}});
    EXPECT_FALSE(moved.complete());
    EXPECT_EQ(region.poll(), 1u) << "the stream has not passed";
    EXPECT_EQ(region.segments()[0].where.kind, tier::device);
    region.grow(tier::device, granule);  // goes on meanwhile
  }
  region.finish();
  EXPECT_TRUE(moved.complete());
  EXPECT_EQ(region.poll(), 0u);
  EXPECT_EQ(region.segments()[0].where.kind, tier::host);
  std::vector<std::byte> found(granule);
  on->copy(reinterpret_cast<address>(found.data()), at(region), granule, stream);
  on->synchronize(stream);
  EXPECT_EQ(found, std::vector<std::byte>(granule, std::byte{0x5a}))
      << "work enqueued before the call is part of what moves";
  on->destroy_stream(stream);
}

TEST_P(region_contract, a_deferred_shrink_unmaps_only_when_its_streams_have_passed) {
  auto region = make_region();
  region.grow(tier::device, granule);
  region.grow(tier::device, granule);
  const native_stream stream = on->create_stream({0});
  pending_change dropped;
  {
    stream_gate gate(*on, stream);
    on->fill(at(region, granule), std::byte{1}, granule, stream);
    dropped = region.shrink_later(granule, {.streams = {&stream, 1}});
    EXPECT_EQ(region.size(), granule) << "leaves size() at once";
    ASSERT_EQ(region.segments().size(), 2u);
    EXPECT_EQ(region.segments()[1].state, segment_state::retiring);
    EXPECT_EQ(region.poll(), 1u);
    EXPECT_FALSE(dropped.complete());
  }
  on->synchronize(stream);  // the fill would fault had it been unmapped under it
  region.finish();
  EXPECT_TRUE(dropped.complete());
  EXPECT_EQ(region.segments().size(), 1u);
  EXPECT_EQ(region.grow(tier::device, granule).offset, granule) << "its addresses serve again";
  on->destroy_stream(stream);
}

TEST_P(region_contract, changes_elsewhere_neither_stall_nor_corrupt_a_busy_stream) {
  auto region = make_region();
  for (int i = 0; i < 3; ++i) region.grow(tier::device, granule);
  write_pattern(*on, at(region), region.size(), 5);
  const native_stream busy = on->create_stream({0});
  {
    stream_gate gate(*on, busy);
    gate.wait_reached();
    on->fill(at(region), std::byte{7}, granule, busy);
    region.grow(tier::host, granule);
    region.migrate(1, tier::host);
    region.migrate(1, tier::device);
    EXPECT_EQ(region.shrink(granule), granule);
    EXPECT_FALSE(on->idle(busy)) << "none of it waited for the busy stream";
  }
  on->synchronize(busy);
  EXPECT_TRUE(holds_pattern(*on, at(region, 2 * granule), granule, 5) ||
              region.size() == 3 * granule);
  std::vector<std::byte> found(granule);
  on->copy(reinterpret_cast<address>(found.data()), at(region), granule, busy);
  on->synchronize(busy);
  EXPECT_EQ(found, std::vector<std::byte>(granule, std::byte{7}));
  on->destroy_stream(busy);
}

TEST_P(region_contract, discard_with_backup_gives_memory_back_and_restores_contents) {
  auto region = make_region();
  region.grow(tier::device, 2 * granule);
  region.grow(tier::host, granule);
  write_pattern(*on, at(region), region.size(), 8);
  region.discard(contents::backup);
  EXPECT_EQ(region.size(), 3 * granule) << "the addresses stay";
  EXPECT_EQ(region.statistics().discarded_bytes, 3 * granule);
  EXPECT_EQ(region.statistics().backup_bytes, 3 * granule);
  EXPECT_EQ(region.statistics().handles_created, 3u) << "one of them holds a backup";
  EXPECT_EQ(region.statistics().handles_released, 1u) << "the host's is its own";
  EXPECT_EQ(region.statistics().device_bytes, 0u);
  EXPECT_EQ(region.segments()[0].state, segment_state::discarded);
  EXPECT_THROW(region.migrate(0, tier::host), invalid_argument);
  region.restore();
  EXPECT_TRUE(holds_pattern(*on, at(region), region.size(), 8));
  EXPECT_EQ(region.segments()[0].where.kind, tier::device);
  EXPECT_EQ(region.statistics().discarded_bytes, 0u);
  EXPECT_EQ(region.statistics().backup_bytes, 0u);
}

TEST_P(region_contract, discard_takes_a_part_and_drops_what_need_not_be_kept) {
  auto region = make_region();
  for (int i = 0; i < 3; ++i) region.grow(tier::device, granule);
  write_pattern(*on, at(region), region.size(), 9);
  region.discard(contents::drop, {}, 1, 1);
  EXPECT_EQ(region.statistics().discarded_bytes, granule);
  EXPECT_EQ(region.statistics().backup_bytes, 0u);
  EXPECT_TRUE(holds_pattern(*on, at(region), granule, 9)) << "its neighbours are untouched";
  region.discard(contents::drop);  // the rest
  EXPECT_EQ(region.statistics().discarded_bytes, 3 * granule);
  EXPECT_EQ(region.statistics().handles_released, 3u);
  region.restore();
  write_pattern(*on, at(region), region.size(), 10);
  EXPECT_TRUE(holds_pattern(*on, at(region), region.size(), 10));
}

TEST_P(region_contract, observers_hear_before_and_after_and_may_veto) {
  auto region = make_region();
  std::vector<std::string> heard;
  bool forbid = false;
  auto subscription =
      region.observe({.before_change =
                          [&](const region_change& change) {
                            heard.push_back(std::string("before ") + to_string(change.kind));
                            if (forbid) throw unsupported("in use by a graph");
                          },
                      .after_change =
                          [&](const region_change& change) {
                            heard.push_back((change.committed ? "after " : "off ") +
                                            std::string(to_string(change.kind)) + " " +
                                            std::to_string(change.epoch));
                          }});
  region.grow(tier::device, granule);
  write_pattern(*on, at(region), granule, 11);
  region.migrate(0, tier::host);
  EXPECT_EQ(heard, (std::vector<std::string>{"before grow", "after grow 1", "before migrate",
                                             "after migrate 2"}));
  heard.clear();
  forbid = true;
  EXPECT_THROW(region.migrate(0, tier::device), unsupported);
  EXPECT_THROW(region.shrink(granule), unsupported);
  EXPECT_EQ(heard, (std::vector<std::string>{"before migrate", "before shrink"}))
      << "the one that vetoed is not told that it is off";
  EXPECT_EQ(region.size(), granule);
  EXPECT_EQ(region.epoch(), 2u);
  EXPECT_TRUE(holds_pattern(*on, at(region), granule, 11));
  subscription.reset();
  heard.clear();
  region.shrink(granule);
  EXPECT_TRUE(heard.empty());
}

TEST_P(region_contract, never_has_more_segments_than_allowed) {
  auto region = make_region(600, {.max_segments = 8});
  region.grow(tier::device, 40 * granule);
  while (region.size() < region.reserved()) region.grow(tier::device, granule);
  EXPECT_LE(region.segments().size(), 8u);
  EXPECT_THROW(region.grow(tier::device, granule), invalid_argument);
}

TEST_P(region_contract, large_growth_is_cut_into_segments) {
  auto region = make_region(64, {.max_segment_bytes = 2 * granule});
  const grown added = region.grow(tier::device, 5 * granule);
  EXPECT_EQ(added.bytes, 5 * granule);
  ASSERT_EQ(region.segments().size(), 3u);
  EXPECT_EQ(region.segments()[2].offset, 4 * granule);
  EXPECT_EQ(region.segments()[2].bytes, granule);
  EXPECT_EQ(region.epoch(), 1u) << "one change";
  write_pattern(*on, at(region), region.size(), 12);
  EXPECT_TRUE(holds_pattern(*on, at(region), region.size(), 12));
}

TEST_P(region_contract, wrong_calls_name_the_value_and_the_limit) {
  auto region = make_region(4);
  const auto says = [](const std::function<void()>& call) -> std::string {
    try {
      call();
    } catch (const invalid_argument& refused) {
      return refused.what();
    }
    return "accepted";
  };
  EXPECT_NE(says([&] { region.grow(tier::device, 0); }).find("0 bytes"), std::string::npos);
  EXPECT_NE(says([&] { region.grow(tier::device, 5 * granule); }).find("reserve"),
            std::string::npos);
  EXPECT_NE(says([&] { region.grow(tier::device, std::size_t(-1)); }).find("18446744073709551615"),
            std::string::npos);
  EXPECT_NE(says([&] { region.migrate(3, tier::host); }).find("no segment 3"), std::string::npos);
  EXPECT_NE(says([&] { region.discard(contents::drop, {}, 1); }).find("no segment 1"),
            std::string::npos);
  EXPECT_NE(says([&] { (void)elastic_region(on, {}); }).find("0 bytes"), std::string::npos);
  EXPECT_NE(
      says([&] { (void)elastic_region(on, {.reserve = granule, .max_segments = 65}); }).find("65"),
      std::string::npos);
  EXPECT_NE(
      says([&] { (void)elastic_region(on, {.device = {99}, .reserve = granule}); }).find("99"),
      std::string::npos);
  region_options elsewhere{.reserve = granule,
                           .host = {.how = host_placement::policy::bind, .nodes = {{77}}}};
  EXPECT_NE(says([&] { elastic_region(on, elsewhere).grow(tier::host, granule); }).find("77"),
            std::string::npos);
  EXPECT_EQ(region.size(), 0u);
  EXPECT_EQ(region.epoch(), 0u);
}

}  // namespace evmm::test
