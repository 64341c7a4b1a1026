// SPDX-License-Identifier: Apache-2.0
// Which way exchanges of an NCCL link go, and what it says of the way that they do not.
#include "comm/nccl_gin.hpp"
#include "lib/support/nccl_version.hpp"
#include "tests/support/channel_bench.hpp"
#include "tests/support/fake_gin_kernels.hpp"
#include "tests/support/nccl_ranks.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/comm/symmetric_channel.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::Eq;
using testing::HasSubstr;
using testing::StartsWith;

TEST(gin, kernels_run_with_the_nccl_that_they_were_compiled_with) {
  EXPECT_EQ(why_not_gin_kernels(23007, 23007), "");
  EXPECT_THAT(why_not_gin_kernels(0, 23007), HasSubstr("without nccl_device.h"));
  for (const int loaded : {22809, 23004, 23008, 23100}) {
    EXPECT_THAT(
        why_not_gin_kernels(23007, loaded),
        AllOf(HasSubstr("2.30.7"), HasSubstr(nccl_version_text(loaded)), HasSubstr("NCCL_ROOT")));
  }
}

TEST(gin, a_fabric_must_lead_from_each_rank_to_all) {
  EXPECT_EQ(why_not_gin_fabric({.windows = true, .to_all = true, .on_rails = true}), "");
  EXPECT_THAT(why_not_gin_fabric({.windows = true, .on_rails = true}), HasSubstr("same index"));
  EXPECT_THAT(why_not_gin_fabric({.windows = true}),
              AllOf(HasSubstr("InfiniBand or RoCE"), HasSubstr("NCCL_DEBUG")));
  EXPECT_THAT(why_not_gin_fabric({}), HasSubstr("windows"));
}

// --- which way ----------------------------------------------------------------------------------

/// Two ranks on two nodes, each with an NCCL link and kernels that threads carry out.
class nccl_link_ways : public ::testing::Test {
 protected:
  using body = std::function<void(const rank_context&, const channel_options&)>;

  void run(const fake_nccl_settings& settings, const nccl_link_options& options, const body& each) {
    const nccl_fixture fake(settings);
    use_fake_gin(gin);
    const auto bootstraps = make_thread_bootstraps(2, {"a", "b"});
    std::vector<std::shared_ptr<driver>> drivers;
    for (int r = 0; r < 2; ++r) {
      drivers.push_back(host_driver::make({.device_bytes = 1_GiB, .host_bytes = 4_GiB}));
    }
    const fake_nccl_streams streams(drivers);
    const auto thrown = run_ranks(2, [&](int rank) {
      const auto& ranks = bootstraps[static_cast<std::size_t>(rank)];
      ranks->set_timeout(timeout);
      const rank_context at{.ranks = ranks, .on = drivers[static_cast<std::size_t>(rank)]};
      if (gin != nullptr) gin->drivers[static_cast<std::size_t>(rank)] = at.on;
      nccl_communicator nccl(ranks, at.on);
      each(at, {.link = make_nccl_link(nccl, ranks->make_link(), options)});
      nccl.close();
    });
    for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
    use_fake_gin(nullptr);
  }

  /// What a channel says of its way, on each rank.
  void expect_way(const fake_nccl_settings& settings, const nccl_link_options& options,
                  const testing::Matcher<std::string>& says) {
    run(settings, options, [&](const rank_context& at, const channel_options& how) {
      channel_bench b(at, how);
      EXPECT_THAT(b.channel.statistics().exchange, says);
      EXPECT_EQ(b.channel.statistics().link, "nccl and threads");
      b.finish();
    });
  }

  std::shared_ptr<fake_gin> gin = std::make_shared<fake_gin>(2);
  milliseconds timeout = milliseconds(20'000);
};

TEST_F(nccl_link_ways, gin_puts_blocks_where_all_ranks_have_it) {
  expect_way({.version = 23007}, {}, Eq("NCCL GIN"));
  gin = std::make_shared<fake_gin>(2);
  run({.version = 23007}, {}, [](const rank_context& at, const channel_options& options) {
    run_skewed_all_to_all(at, options);
  });
  EXPECT_GT(gin->puts, 0);
}

TEST_F(nccl_link_ways, gin_follows_the_region_and_rests_while_nccl_cannot_have_it) {
  run({.version = 23007}, {}, [&](const rank_context& at, const channel_options& options) {
    channel_bench b(at, options);
    const std::size_t peer = 1 - static_cast<std::size_t>(b.me());
    const std::size_t end = b.region.size();
    b.region.grow(tier::device, at.granule());
    std::vector<outgoing_block> out(2);
    std::vector<incoming_block> in(2);
    out[peer] = {.from = 0, .to = end, .bytes = 4096};
    in[peer] = {.at = end, .bytes = 4096};
    b.write(0, 4096, seed_of(1, b.me(), 0));
    b.channel.all_to_all_v(out, in, b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_TRUE(b.holds(end, 4096, seed_of(1, static_cast<int>(peer), 0)));
    b.region.discard(contents::drop, {}, 2, 1);
    EXPECT_THAT(
        b.channel.statistics().exchange,
        AllOf(StartsWith("NCCL send and receive; NCCL GIN is down: "), HasSubstr("is discarded")));
    b.region.restore();
    EXPECT_EQ(b.channel.statistics().exchange, "NCCL GIN");
    b.finish();
  });
  EXPECT_EQ(gin->puts, 2);
}

TEST_F(nccl_link_ways, sends_and_receives_where_nccl_is_older_than_gin) {
  expect_way({.version = 22809}, {},
             AllOf(StartsWith("NCCL send and receive (no GIN: rank 0: NCCL 2.28.9"),
                   HasSubstr("2.30.4 has")));
}

TEST_F(nccl_link_ways, sends_and_receives_where_the_kernels_are_for_another_nccl) {
  gin->version = 22809;
  expect_way({.version = 23007}, {},
             AllOf(StartsWith("NCCL send and receive (no GIN: rank 0: "), HasSubstr("2.28.9")));
  gin = nullptr;
  expect_way({.version = 23007}, {}, HasSubstr("built without nccl_device.h"));
}

TEST_F(nccl_link_ways, a_rank_without_the_network_decides_for_all) {
  gin->fabrics[1] = {.windows = true};
  expect_way({.version = 23007}, {},
             StartsWith("NCCL send and receive (no GIN: rank 1: NCCL finds no network with GIN"));
}

TEST_F(nccl_link_ways, a_gin_that_does_not_start_takes_nothing_else_along) {
  timeout = milliseconds(2000);
  expect_way({.version = 23007, .fail_rank = 1, .fail_device = 1}, {},
             AllOf(StartsWith("NCCL send and receive (no GIN: "), HasSubstr("ncclDevCommCreate")));
}

TEST_F(nccl_link_ways, sends_and_receives_when_told_to) {
  expect_way({.version = 23007}, {.gin = false}, HasSubstr("nccl_link_options::gin is off"));
}

}  // namespace
}  // namespace evmm::test
