// SPDX-License-Identifier: Apache-2.0
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/region_contract.hpp"
#include "tests/support/region_fault_contract.hpp"

#include <evmm/elastic_region.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {
namespace {

const driver_choice k_host{
    "host", [](std::string*) {
      return host_driver::make({.devices = 2, .device_bytes = 4_GiB, .host_bytes = 4_GiB});
    }};
const auto k_name = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(drivers, region_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, region_fault_contract, ::testing::Values(k_host), k_name);

TEST(elastic_region, grows_past_the_device_into_the_host_tier) {
  const auto on = host_driver::make({.device_bytes = 16_MiB, .host_bytes = 1_GiB});
  elastic_region region(on, {.reserve = 64_MiB});
  region.grow(tier::device, 12_MiB);
  try {
    region.grow(tier::device, 8_MiB);
    FAIL() << "8 MiB do not fit";
  } catch (const out_of_memory& full) {
    const std::string said = full.what();
    EXPECT_NE(said.find("8.0 MiB on DEVICE 0"), std::string::npos) << said;
    EXPECT_NE(said.find("4.0 MiB of 16.0 MiB are free"), std::string::npos) << said;
    EXPECT_NE(full.help().find("tier::host"), std::string::npos) << full.help();
  }
  EXPECT_EQ(region.size(), 12_MiB);
  EXPECT_EQ(region.epoch(), 1u);
  region.grow(tier::host, 20_MiB);
  EXPECT_GT(region.size(), on->describe({0}).total_bytes);
  write_pattern(*on, reinterpret_cast<address>(region.data()), region.size(), 1);
  EXPECT_TRUE(holds_pattern(*on, reinterpret_cast<address>(region.data()), region.size(), 1));
}

TEST(elastic_region, cached_handles_give_way_to_a_larger_one) {
  const auto on = host_driver::make({.device_bytes = 16_MiB});
  elastic_region region(on, {.reserve = 64_MiB});
  region.grow(tier::device, 6_MiB);
  region.grow(tier::device, 6_MiB);
  region.shrink(12_MiB);
  EXPECT_EQ(region.statistics().cached_bytes, 12_MiB);
  region.grow(tier::device, 10_MiB);
  EXPECT_EQ(region.statistics().cached_bytes, 6_MiB) << "only as many as had to go";
}

TEST(elastic_region, a_driver_that_stops_telling_its_free_memory_is_an_error) {
  const auto faulty = fault_driver::make(host_driver::make({.device_bytes = 16_MiB}));
  elastic_region region(faulty, {.reserve = 64_MiB});
  region.grow(tier::device, 6_MiB);
  region.grow(tier::device, 6_MiB);
  region.shrink(12_MiB);
  // Asked before the growth, and again while cached handles give way to it.
  for (std::size_t nth = 0; nth < 2; ++nth) {
    faulty->fail_call(driver_call::usage, nth);
    EXPECT_THROW(region.grow(tier::device, 10_MiB), driver_error);
    EXPECT_TRUE(faulty->disarm());
    EXPECT_EQ(region.size(), 0u);
  }
  region.grow(tier::device, 10_MiB);
}

TEST(elastic_region, interleaves_the_host_tier_over_nodes) {
  const auto on = host_driver::make({.numa_nodes = {0, 1}});
  elastic_region region(
      on, {.reserve = 64_MiB, .host = {.how = host_placement::policy::interleave, .nodes = {}}});
  for (int i = 0; i < 4; ++i) region.grow(tier::host, 2_MiB);
  std::vector<int> nodes;
  for (const segment& held : region.segments()) nodes.push_back(held.where.index);
  EXPECT_EQ(nodes, (std::vector<int>{0, 1, 0, 1}));
}

TEST(elastic_region, a_second_device_reaches_it_when_asked_for) {
  const auto on = host_driver::make({.devices = 2});
  elastic_region region(on, {.reserve = 8_MiB, .peers = {{1}}});
  region.grow(tier::device, 2_MiB);
  write_pattern(*on, reinterpret_cast<address>(region.data()), 2_MiB, 4);
  EXPECT_THROW(elastic_region(on, {.reserve = 8_MiB, .peers = {{5}}}), error);
}

TEST(elastic_region, deferred_changes_follow_the_streams_of_peers) {
  const auto on = host_driver::make({.devices = 3});
  elastic_region region(on, {.reserve = 64_MiB, .peers = {{1}, {2}}});
  for (int i = 0; i < 3; ++i) region.grow(tier::device, 2_MiB);
  const native_stream stream = on->create_stream({2});
  {
    stream_gate gate(*on, stream);
    on->fill(reinterpret_cast<address>(region.data()), std::byte{7}, 2_MiB, stream);
    region.shrink_later(2_MiB, {.streams = {&stream, 1}});
    region.migrate_later(0, tier::host, {.streams = {&stream, 1}});
    EXPECT_EQ(region.poll(), 2u) << "the stream has not passed";
  }
  region.finish();
  EXPECT_EQ(region.size(), 4_MiB);
  EXPECT_EQ(*region.data(), std::byte{7});
  on->destroy_stream(stream);
}

TEST(elastic_region, a_host_tier_that_is_full_is_out_of_memory_from_the_first_use_on) {
  const auto on = host_driver::make({.host_bytes = 4_MiB, .numa_nodes = {0, 1}});
  elastic_region first(
      on, {.reserve = 64_MiB, .host = {.how = host_placement::policy::interleave, .nodes = {}}});
  first.grow(tier::host, 4_MiB);
  first.grow(tier::host, 4_MiB);
  elastic_region second(on, {.reserve = 64_MiB});
  try {
    second.grow(tier::host, 2_MiB);
    FAIL() << "both nodes are full";
  } catch (const out_of_memory& full) {
    const std::string said = full.what();
    EXPECT_NE(said.find("HOST_NUMA 0"), std::string::npos) << said;
    EXPECT_NE(said.find("HOST_NUMA 1"), std::string::npos) << said;
  }
  first.shrink(4_MiB);
  first.trim_cache();
  second.grow(tier::host, 2_MiB);
}

TEST(elastic_region, observers_of_a_shrink_see_the_segments_before_and_after) {
  const auto on = host_driver::make();
  elastic_region region(on, {.reserve = 64_MiB});
  for (int i = 0; i < 3; ++i) region.grow(tier::device, 2_MiB);
  std::vector<std::size_t> sizes;
  const auto look = [&](const region_change&) { sizes.push_back(region.size()); };
  const auto looks = region.observe({.before_change = look, .after_change = look});
  {
    const auto vetoes = region.observe(
        {.before_change = [](const region_change&) { throw unsupported("in use by a graph"); }});
    EXPECT_THROW(region.shrink(2_MiB), unsupported);
  }
  EXPECT_EQ(sizes, (std::vector<std::size_t>{6_MiB, 6_MiB})) << "it was off";
  sizes.clear();
  EXPECT_EQ(region.shrink(2_MiB), 2_MiB);
  EXPECT_EQ(sizes, (std::vector<std::size_t>{6_MiB, 4_MiB}));
}

/// A driver that refuses a number of maps after some more.
class full_of_mappings final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  void map(address at, std::size_t bytes, allocation_handle handle) override {
    if (left == 0 && refused > 0) {
      --refused;
      throw driver_error("no more mappings");
    }
    left -= left > 0 ? 1 : 0;
    forwarding_driver::map(at, bytes, handle);
  }
  std::size_t left = 0;
  std::size_t refused = 0;
};

TEST(elastic_region, a_segment_that_could_not_be_put_back_can_be_discarded_and_restored) {
  const auto on = std::make_shared<full_of_mappings>(host_driver::make());
  elastic_region region(on, {.reserve = 64_MiB});
  region.grow(tier::device, 2_MiB);
  region.grow(tier::device, 2_MiB);
  write_pattern(*on, reinterpret_cast<address>(region.data()), region.size(), 2);
  // The copy may map, the swap may not; putting back is tried twice.
  on->left = 1;
  on->refused = 2;
  EXPECT_THROW(region.migrate(0, tier::host), driver_error);
  EXPECT_TRUE(holds_pattern(*on, reinterpret_cast<address>(region.data()), region.size(), 2));
  on->left = 1;
  on->refused = 3;
  EXPECT_THROW(region.migrate(0, tier::host), driver_error);
  region.discard(contents::drop);
  EXPECT_EQ(region.statistics().discarded_bytes, 4_MiB);
  region.restore();
  write_pattern(*on, reinterpret_cast<address>(region.data()), region.size(), 3);
  EXPECT_TRUE(holds_pattern(*on, reinterpret_cast<address>(region.data()), region.size(), 3));
}

TEST(elastic_region, a_stream_that_is_being_captured_is_refused_and_its_capture_goes_on) {
  const auto on = host_driver::make();
  elastic_region region(on, {.reserve = 64_MiB});
  for (int i = 0; i < 2; ++i) region.grow(tier::device, 2_MiB);
  const native_stream stream = on->create_stream({0});
  const uses captured{.streams = {&stream, 1}};
  const std::vector<std::function<void()>> changes = {
      [&] { region.shrink(2_MiB, captured); },
      [&] { region.migrate(0, tier::host, captured); },
      [&] { region.discard(contents::drop, captured); },
      [&] { region.shrink_later(2_MiB, captured); },
      [&] { region.migrate_later(0, tier::host, captured); },
  };
  for (const auto& change : changes) {
    on->begin_capture(stream);
    on->fill(reinterpret_cast<address>(region.data()), std::byte{1}, 8, stream);
    EXPECT_THROW(change(), invalid_argument);
    EXPECT_EQ(on->capture(stream).status, capture_status::active);
    EXPECT_EQ(region.poll(), 0u);
    EXPECT_NO_THROW(on->end_capture(stream));
  }
  EXPECT_EQ(region.size(), 4_MiB);
  region.migrate(0, tier::host);
  on->destroy_stream(stream);
}

TEST(elastic_region, an_event_of_a_capture_is_refused_and_draws_nothing_into_it) {
  const auto on = host_driver::make();
  elastic_region region(on, {.reserve = 64_MiB});
  for (int i = 0; i < 2; ++i) region.grow(tier::device, 2_MiB);
  const native_stream stream = on->create_stream({0});
  const native_event event = on->create_event({0});
  const uses captured{.events = {&event, 1}};
  const std::vector<std::function<void()>> changes = {
      [&] { region.shrink_later(2_MiB, captured); },
      [&] { region.migrate_later(0, tier::host, captured); },
  };
  for (const auto& change : changes) {
    on->begin_capture(stream);
    on->fill(reinterpret_cast<address>(region.data()), std::byte{1}, 8, stream);
    on->record(event, stream);
    EXPECT_THROW(change(), invalid_argument);
    EXPECT_EQ(region.poll(), 0u);
    EXPECT_NO_THROW(on->end_capture(stream));
  }
  region.migrate_later(0, tier::host);
  region.finish();
  EXPECT_EQ(region.segments()[0].where.kind, tier::host);
  on->destroy_event(event);
  on->destroy_stream(stream);
}

TEST(elastic_region, memory_that_retires_counts_until_it_is_unmapped) {
  const auto on = host_driver::make();
  elastic_region region(on, {.reserve = 64_MiB, .cache_limit = 0});
  for (const tier kind : {tier::host, tier::device, tier::device}) region.grow(kind, 2_MiB);
  region.discard(contents::backup, {}, 2, 1);
  const native_stream stream = on->create_stream({0});
  const auto held = [&] {
    const region_statistics now = region.statistics();
    return std::vector{now.host_bytes, now.device_bytes, now.backup_bytes};
  };
  {
    stream_gate gate(*on, stream);
    region.shrink_later(6_MiB, {.streams = {&stream, 1}});
    EXPECT_EQ(region.size(), 0u);
    EXPECT_EQ(held(), (std::vector{2_MiB, 2_MiB, 2_MiB}));
  }
  region.finish();
  EXPECT_EQ(held(), (std::vector<std::size_t>{0, 0, 0}));
  on->destroy_stream(stream);
}

TEST(elastic_region, a_deferred_change_that_is_forbidden_stays_pending) {
  const auto on = host_driver::make();
  elastic_region region(on, {.reserve = 64_MiB});
  for (int i = 0; i < 2; ++i) region.grow(tier::device, 2_MiB);
  write_pattern(*on, reinterpret_cast<address>(region.data()), 2_MiB, 4);
  const pending_change moves = region.migrate_later(0, tier::host);
  const pending_change shrinks = region.shrink_later(2_MiB);
  {
    const auto vetoes = region.observe(
        {.before_change = [](const region_change&) { throw unsupported("in use by a graph"); }});
    EXPECT_THROW(region.finish(), unsupported);
    EXPECT_THROW(region.grow(tier::device, 2_MiB), unsupported) << "whose addresses retire";
    EXPECT_FALSE(moves.complete() || shrinks.complete());
  }
  region.finish();
  EXPECT_TRUE(moves.complete() && shrinks.complete());
  EXPECT_EQ(region.segments()[0].where.kind, tier::host);
  EXPECT_TRUE(holds_pattern(*on, reinterpret_cast<address>(region.data()), 2_MiB, 4));
}

TEST(elastic_region, a_forked_child_is_told_so) {
  const auto on = host_driver::make();
  elastic_region region(on, {.reserve = 8_MiB});
  region.grow(tier::device, 2_MiB);
  const pid_t child = fork();
  if (child == 0) {
    int code = 1;
    try {
      region.grow(tier::device, 2_MiB);
    } catch (const invalid_argument& refused) {
      code = std::string(refused.what()).find("fork") != std::string::npos ? 0 : 2;
    }
    _exit(code);
  }
  int status = 0;
  waitpid(child, &status, 0);
  EXPECT_EQ(WEXITSTATUS(status), 0);
}

}  // namespace
}  // namespace evmm::test
