// SPDX-License-Identifier: Apache-2.0
#include "tests/support/one_default_stream.hpp"
#include "tests/support/thread_hosts.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/elastic_region.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

class channel_default_stream : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(hosts, channel_default_stream, ::testing::Values("aa", "ab"),
                         [](const auto& info) { return info.param; });

TEST_P(channel_default_stream, is_that_of_the_regions_device) {
  run_hosts(GetParam(), [](const rank_context& outer) {
    rank_context at = outer;
    at.device = device_id{1};
    const auto on = std::make_shared<one_default_stream>(
        host_driver::make({.devices = 2, .device_bytes = 64_MiB}), at.device);
    at.on = on;
    on->set_current_device(device_id{0});
    auto region = at.make({.device = at.device});
    region.grow(tier::device, at.granule());
    region.grow(tier::device, at.granule());
    symmetric_channel channel(region);
    const native_stream all[] = {nullptr};
    const rank_id peer{1 - at.ranks->rank().value};
    std::vector<std::byte> bytes(64);
    channel.put_signal(peer, 0, bytes, {64, 1}, nullptr);
    channel.wait_signal(peer, {64, 1}, nullptr);
    channel.get(peer, 0, bytes, nullptr);
    channel.barrier(nullptr);
    const std::vector<outgoing_block> out(2, {.from = 0, .to = 128, .bytes = 8});
    const std::vector<incoming_block> in(2, {.at = 128, .bytes = 8});
    channel.all_to_all_v(out, in, nullptr);
    channel.synchronize(nullptr);
    const int before = on->uses();
    region.shrink(at.granule(), {.streams = all});
    EXPECT_GT(on->uses(), before);
    EXPECT_EQ(on->current_device(), device_id{0}) << "the thread's own is put back";
    channel.close();
    region.close({.streams = all});
  });
}

TEST(default_stream, of_an_elastic_region_is_that_of_its_device) {
  const auto on = std::make_shared<one_default_stream>(
      host_driver::make({.devices = 2, .device_bytes = 64_MiB}), device_id{1});
  on->set_current_device(device_id{0});
  elastic_region region(on, {.device = device_id{1}, .reserve = 64_MiB});
  for (int i = 0; i < 4; ++i) region.grow(tier::device, 2_MiB);
  const native_stream all[] = {nullptr};
  const uses in_use{.streams = all};
  int before = 0;
  const auto expect_asked = [&](const char* what) {
    EXPECT_GT(on->uses(), std::exchange(before, on->uses())) << what;
  };
  region.migrate(0, tier::host, in_use);
  expect_asked("migrate");
  region.migrate_later(1, tier::host, in_use);
  expect_asked("migrate_later");
  region.shrink(2_MiB, in_use);
  expect_asked("shrink");
  region.shrink_later(2_MiB, in_use);
  expect_asked("shrink_later");
  region.discard(contents::drop, in_use);
  expect_asked("discard");
  EXPECT_EQ(on->current_device(), device_id{0});
}

}  // namespace
}  // namespace evmm::test
