// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/ep/low_latency.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

struct threads_case {
  std::string hosts;  ///< of each rank: "aabb" for two of two ranks each
  symmetric_case tried;
  friend void PrintTo(const threads_case& run, std::ostream* out) {
    *out << run.tried.name << " on " << run.hosts;
  }
};
class ep_threads : public ::testing::TestWithParam<threads_case> {};

TEST_P(ep_threads, holds) {
  const auto size = static_cast<int>(GetParam().hosts.size());
  std::vector<std::string> hosts;
  for (const char host : GetParam().hosts) hosts.emplace_back(1, host);
  const auto bootstraps = make_thread_bootstraps(size, hosts);
  const auto thrown = run_ranks(size, [&](int rank) {
    GetParam().tried.run({.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({.device_bytes = 4_GiB, .host_bytes = 4_GiB})});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(ep_nodes, have_as_many_ranks_each) {
  const auto bootstraps = make_thread_bootstraps(3, {"a", "a", "b"});
  run_ranks(3, [&](int rank) {
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({})};
    symmetric_heap heap(at.make());
    symmetric_channel across(heap.region());
    EXPECT_THAT(
        thrown_by([&] { ep::exchange(heap, across, {.experts = 3, .top_k = 1, .hidden = 128}); }),
        ::testing::HasSubstr("the node of rank 0 has 2 ranks, that of rank 2 has 1"));
    across.close();
  });
}

TEST(ep_footprint, refuses_what_cannot_be) {
  const ep::exchange_options good{.experts = 128, .top_k = 8, .hidden = 7168};
  EXPECT_GT(ep::footprint(good, {.ranks = 64, .nodes = 8}).device_bytes, 0u);
  const auto refused = [](const ep::exchange_options& options, const ep::job_shape& job,
                          const char* why) {
    EXPECT_THAT(thrown_by([&] { ep::footprint(options, job); }), ::testing::HasSubstr(why));
    EXPECT_THAT(thrown_by([&] { ep::plan_footprint(options, job); }), ::testing::HasSubstr(why));
  };
  refused(good, {.ranks = 3, .nodes = 2}, "a job of 3 ranks on 2 nodes");
  refused(good, {.ranks = 0, .nodes = 1}, "a job of 0 ranks");
  refused(good, {.ranks = 128, .nodes = 1}, "128 ranks on a node");
  refused(good, {.ranks = 128, .nodes = 128}, "128 nodes");
  refused(good, {.ranks = 3, .nodes = 1}, "experts is 128, with 3 ranks");
  auto large = good;
  large.max_tokens = std::size_t{1} << 20;
  large.top_k = 32;
  refused(large, {.ranks = 64, .nodes = 1}, "up to 2147483648 choices come to a rank");
  EXPECT_THAT(thrown_by([] {
                ep::footprint(ep::low_latency_options{.experts = 2, .hidden = 100}, {.ranks = 2});
              }),
              ::testing::HasSubstr("hidden is 100"));
}

TEST(ep_nodes, a_rank_that_did_not_come_is_named_as_the_job_does) {
  const auto bootstraps = make_thread_bootstraps(4, {"a", "a", "b", "b"});
  const auto thrown = run_ranks(4, [&](int rank) {
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({})};
    symmetric_heap heap(at.make());
    symmetric_channel across(heap.region());
    ep::exchange exchange(heap, across,
                          {.experts = 4,
                           .top_k = 1,
                           .hidden = 128,
                           .max_tokens = 4,
                           .sms = 1,
                           .timeout = std::chrono::milliseconds(200)});
    ep::plan plan = exchange.make_plan();
    if (rank % 2 == 0) {
      exchange.dispatch({}, plan, nullptr);
      at.on->synchronize(native_stream{nullptr});
      EXPECT_THAT(thrown_by([&] { exchange.check(); }),
                  ::testing::HasSubstr("ranks " + std::to_string(rank + 1) + " did not come"));
    }
    at.ranks->barrier("all have seen it");
    across.close();
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

std::vector<threads_case> all_cases() {
  std::vector<threads_case> all;
  for (const char* hosts : {"a", "aa", "aaaa", "ab", "abab", "abc"}) {
    for (const auto* cases : {&ep_cases(), &low_latency_cases(), &lost_rank_cases()}) {
      for (const symmetric_case& tried : *cases) all.push_back({hosts, tried});
    }
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(ranks, ep_threads, ::testing::ValuesIn(all_cases()), [](const auto& info) {
  return info.param.tried.name + "_" + info.param.hosts;
});

}  // namespace
}  // namespace evmm::test
