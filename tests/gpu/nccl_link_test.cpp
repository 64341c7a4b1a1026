// SPDX-License-Identifier: Apache-2.0
// NCCL between nodes: ranks of this machine that count as several, for evmm and for NCCL alike.
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/channel_bench.hpp"
#include "tests/support/ep_cases.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/comm/nccl_window.hpp>
#include <evmm/driver.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace evmm::test {
namespace {

using namespace evmm::units;

/// A communicator of all ranks, and a channel's options with a link over it.
class nccl_link : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!cuda_available(&why_not)) GTEST_SKIP() << why_not;
    at_.on = default_driver();
    at_.ranks = world();
    // NCCL takes two ranks of one host on one GPU for a mistake, but not of two hosts.
    const int gpus = at_.on->device_count();
    const int ranks_a_node = at_.ranks->size() / at_.ranks->node_count();
    if (gpus < ranks_a_node) {
      GTEST_SKIP() << ranks_a_node << " ranks a node need as many GPUs, there are " << gpus;
    }
    // NCCL tells hosts apart by this, before anything of it runs, and takes its network between
    // them.
    setenv("NCCL_HOSTID", ("evmm-test-" + std::to_string(at_.ranks->node())).c_str(), 1);
    at_.device = device_id{at_.ranks->rank().value % gpus};
    nccl_.emplace(at_.ranks, at_.on, nccl_options{.device = at_.device});
    if (at_.ranks->node_count() > 1) options_.link = make_nccl_link(*nccl_, at_.ranks->make_link());
  }
  void TearDown() override {
    options_.link = nullptr;
    if (nccl_) nccl_->close();
  }

  rank_context at_;
  std::optional<nccl_communicator> nccl_;
  /// Communicators for large puts take a while, and what exchanges makes none.
  channel_options options_{.chunk_bytes = 64_KiB, .chunks = 2, .large = false};
};

TEST_F(nccl_link, all_to_all_v_crosses_nodes_in_stream_order) {
  options_.check_counts = true;
  run_skewed_all_to_all(at_, options_);
}

TEST_F(nccl_link, carries_what_crosses_nodes_in_an_expert_parallel_exchange) {
  run_random_exchanges(at_, 20, 21, options_);
}

TEST_F(nccl_link, carries_what_crosses_nodes_in_low_latency_rounds) {
  run_random_low_latency(at_, 20, 22, options_);
}

/// What a window tells kernels is memory that they reach, or there is nothing to tell.
void expect_followed_or_refused(const rank_context& at, nccl_communicator& on) {
  symmetric_region region(at.ranks, at.on, {.device = at.device, .reserve = 64_MiB});
  region.grow(tier::device, 4_MiB);
  try {
    const nccl_window window(on, region);
    EXPECT_TRUE(at.on->kernels_reach(reinterpret_cast<address>(window.at(2_MiB).window)));
  } catch (const unsupported& refused) {
    EXPECT_THAT(refused.what(), ::testing::AnyOf(::testing::HasSubstr("collectives alone"),
                                                 ::testing::HasSubstr("registered nothing")));
  }
  region.close();
}

TEST_F(nccl_link, windows_lead_kernels_to_memory_or_are_refused) {
  expect_followed_or_refused(at_, *nccl_);
}

TEST_F(nccl_link, windows_of_the_only_rank_lead_kernels_to_memory_or_are_refused) {
  rank_context alone = at_;
  alone.ranks = make_thread_bootstraps(1)[0];
  nccl_communicator on(alone.ranks, at_.on, nccl_options{.device = at_.device});
  expect_followed_or_refused(alone, on);
  on.close();
}

/// What a channel promises, with all but the smallest puts and gets by NCCL.
class nccl_link_channel : public nccl_link, public ::testing::WithParamInterface<symmetric_case> {};

TEST_P(nccl_link_channel, holds) {
  at_.link = [&] {
    return make_nccl_link(*nccl_, at_.ranks->make_link(), {.large = 8_KiB, .large_piece = 40'000});
  };
  GetParam().run(at_);
}
const auto k_name = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(pairs, nccl_link_channel, ::testing::ValuesIn(channel_cases()), k_name);
INSTANTIATE_TEST_SUITE_P(all, nccl_link_channel, ::testing::ValuesIn(channel_collective_cases()),
                         k_name);

TEST_F(nccl_link, large_puts_and_gets_of_gpu_memory_go_by_nccl) {
  if (options_.link == nullptr) GTEST_SKIP() << "one node";
  options_.link = make_nccl_link(*nccl_, at_.ranks->make_link(), {.large_piece = 5_MiB});
  options_.large = true;
  channel_bench b(at_, options_);
  b.region.grow(tier::device, 32_MiB);
  b.region.grow(tier::host, 16_MiB);
  const std::size_t end = b.region.size();
  const std::size_t bytes = 20_MiB;  // both tiers, in its second half
  const rank_id next{(b.me() + 1) % b.ranks()};
  const rank_id previous{(b.me() + b.ranks() - 1) % b.ranks()};
  std::size_t large = 0;
  for (std::uint64_t round = 1; round <= 5; ++round) {
    b.write(8_MiB, bytes, seed_of(round, b.me(), next.value));
    b.channel.barrier(b.stream);
    b.channel.put(next, end - bytes, b.part(8_MiB, bytes), b.stream);
    b.channel.barrier(b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_TRUE(b.holds(end - bytes, bytes, seed_of(round, previous.value, b.me())));
    // What the next one was sent comes back.
    b.channel.get(next, end - bytes, {b.region.local() + 4_MiB, bytes}, b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_TRUE(b.holds(4_MiB, bytes, seed_of(round, b.me(), next.value)));
    if (b.channel.path_to(next) == channel_path::link) large += 2 * bytes;
  }
  EXPECT_EQ(b.channel.statistics().large_bytes, large);
  b.finish();
}

}  // namespace
}  // namespace evmm::test
