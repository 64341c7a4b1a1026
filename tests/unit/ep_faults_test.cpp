// SPDX-License-Identifier: Apache-2.0
// What a driver that fails on one rank does to objects that all ranks make together.
#include "tests/support/fault_driver.hpp"
#include "tests/support/symmetric_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/ep/low_latency.hpp>
#include <evmm/ep/table.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;
using ::testing::HasSubstr;

/// Something that takes its memory from a heap; `across` is null on one node.
struct collective_object {
  std::string name;
  std::string hosts;  ///< of each rank
  std::function<void(symmetric_heap&, symmetric_channel* across)> make;
  friend void PrintTo(const collective_object& tried, std::ostream* out) { *out << tried.name; }
};

const ep::exchange_options k_exchange{.experts = 4,
                                      .top_k = 2,
                                      .hidden = 4096,
                                      .rows = ep::payload::fp8,
                                      .quantize = true,
                                      .arranged = ep::layout::by_expert,
                                      .max_tokens = 300,
                                      .device_rows = 256,
                                      .adapt_steps = 2,
                                      .sms = 1};
const ep::low_latency_options k_low_latency{
    .experts = 4, .top_k = 2, .hidden = 128, .max_tokens = 10, .sms = 1};

std::vector<collective_object> objects() {
  const auto exchange = [](symmetric_heap& heap, symmetric_channel* across) {
    if (across == nullptr) {
      ep::exchange(heap, k_exchange).make_plan();
    } else {
      ep::exchange(heap, *across, k_exchange).make_plan();
    }
  };
  const auto low_latency = [](symmetric_heap& heap, symmetric_channel* across) {
    if (across == nullptr) {
      ep::low_latency_exchange(heap, k_low_latency);
    } else {
      ep::low_latency_exchange(heap, *across, k_low_latency);
    }
  };
  return {
      {"exchange", "aa", exchange},
      {"exchange_across", "ab", exchange},
      {"low_latency", "aa", low_latency},
      {"low_latency_across", "ab", low_latency},
      {"table", "aa",
       [](symmetric_heap& heap, symmetric_channel*) {
         ep::table(heap, {.rows = 1000, .row_bytes = 128, .cache_rows = 100});
       }},
  };
}

class ep_faults : public ::testing::TestWithParam<collective_object> {};

TEST_P(ep_faults, a_failure_on_one_rank_fails_on_all_and_leaves_nothing) {
  const collective_object& tried = GetParam();
  std::vector<std::string> hosts;
  for (const char host : tried.hosts) hosts.emplace_back(1, host);
  const auto size = static_cast<int>(hosts.size());
  const auto bootstraps = make_thread_bootstraps(size, hosts);
  const rank_id victim{size - 1};
  const auto thrown = run_ranks(size, [&](int rank) {
    const auto faulty = fault_driver::make(host_driver::make({}));
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = faulty};
    const bool me = at.ranks->rank() == victim;
    at.ranks->set_timeout(std::chrono::seconds(5));
    const alive_counts before = faulty->alive();
    for (std::size_t nth = 0;; ++nth) {
      std::optional<symmetric_heap> made;
      symmetric_heap& heap = made.emplace(at.make({.reserve = 256_MiB, .max_segments = 64}));
      std::optional<symmetric_channel> across;
      if (at.ranks->node_count() > 1) across.emplace(heap.region());
      at.ranks->barrier("heaps are there");
      if (me) faulty->fail_call(nth);
      std::string said = thrown_by([&] { tried.make(heap, across ? &*across : nullptr); });
      const bool injected =
          at.ranks->all_gather_value(
              std::uint8_t{me && faulty->disarm()})[static_cast<std::size_t>(victim.value)] != 0;
      SCOPED_TRACE(tried.name + " " + std::to_string(nth) + ": " + said);
      expect_same_text(*at.ranks, said);
      EXPECT_EQ(heap.report().allocated_bytes, 0u);
      if (across) across->close();
      across.reset();
      heap.close();
      made.reset();
      alive_counts after = faulty->alive();
      after.descriptors = before.descriptors;  // other ranks are in this process
      EXPECT_EQ(after, before);
      if (injected && said.empty()) continue;  // it was done without
      if (!injected) {
        EXPECT_EQ(said, "") << "without a failure it succeeds";
        break;
      }
      EXPECT_THAT(said, HasSubstr("rank " + std::to_string(victim.value)));
    }
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}
TEST(ep_calls, a_rank_that_fails_between_the_steps_of_a_dispatch_does_not_go_on) {
  const auto bootstraps = make_thread_bootstraps(2);
  const auto thrown = run_ranks(2, [&](int rank) {
    const auto faulty = fault_driver::make(host_driver::make({}));
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = faulty};
    symmetric_heap heap(at.make());
    ep::exchange exchange(heap, {.experts = 2,
                                 .top_k = 1,
                                 .hidden = 128,
                                 .max_tokens = 4,
                                 .sms = 1,
                                 .timeout = std::chrono::milliseconds(300)});
    ep::plan plan = exchange.make_plan();
    const auto dispatch = [&] {
      exchange.dispatch({}, plan, nullptr);
      faulty->synchronize(native_stream{});
    };
    // Before the first step nothing has happened: it may be tried again.
    if (rank == 1) {
      faulty->fail_call(driver_call::launch, 0);
      EXPECT_THAT(thrown_by(dispatch), HasSubstr("launch fails"));
    }
    dispatch();
    exchange.check();
    at.ranks->barrier("both are in step");
    if (rank == 1) {
      faulty->fail_call(driver_call::launch, 1);
      EXPECT_THAT(thrown_by(dispatch), HasSubstr("launch fails"));
      EXPECT_THAT(thrown_by(dispatch), HasSubstr("failed between its steps"));
      EXPECT_NE(thrown_by([&] { exchange.combine(plan, nullptr, nullptr, nullptr); }), "");
    } else {
      dispatch();
      EXPECT_THAT(thrown_by([&] { exchange.check(); }), HasSubstr("ranks 1 did not come"));
    }
    at.ranks->barrier("both have seen it");
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(ep_calls, a_rank_that_fails_where_peers_count_on_it_does_not_go_on) {
  // What fails: on one node the last steps, across nodes all behind the crossing.
  struct tried {
    std::vector<std::string> hosts;
    std::size_t first, last;  ///< launches of a dispatch
  };
  for (const tried& one : {tried{{"a", "a"}, 1, 3}, tried{{"a", "b"}, 2, 6}}) {
    const auto bootstraps = make_thread_bootstraps(2, one.hosts);
    const auto thrown = run_ranks(2, [&](int rank) {
      const auto faulty = fault_driver::make(host_driver::make({}));
      const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = faulty};
      symmetric_heap heap(at.make());
      std::optional<symmetric_channel> across;
      if (at.ranks->node_count() > 1) across.emplace(heap.region());
      const ep::exchange_options options{.experts = 2,
                                         .top_k = 1,
                                         .hidden = 128,
                                         .arranged = ep::layout::by_expert,
                                         .max_tokens = 4,
                                         .sms = 1,
                                         .timeout = std::chrono::milliseconds(300)};
      for (std::size_t nth = one.first; nth <= one.last; ++nth) {
        std::optional<ep::exchange> made;
        ep::exchange& exchange =
            across ? made.emplace(heap, *across, options) : made.emplace(heap, options);
        ep::plan plan = exchange.make_plan();
        if (rank == 1) faulty->fail_call(driver_call::launch, nth);
        const std::string said = thrown_by([&] { exchange.dispatch({}, plan, nullptr); });
        faulty->synchronize(native_stream{});
        SCOPED_TRACE("launch " + std::to_string(nth) + ": " + said);
        if (rank == 1) {
          EXPECT_THAT(said, HasSubstr("launch fails"));
          const std::string why = "failed between its steps";
          EXPECT_THAT(thrown_by([&] { exchange.dispatch({}, plan, nullptr); }), HasSubstr(why));
          EXPECT_THAT(thrown_by([&] { exchange.counts(); }), HasSubstr(why));
        } else {
          EXPECT_EQ(said, "");
        }
        at.ranks->barrier("both have seen it");
      }
      if (across) across->close();
    });
    for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
  }
}

INSTANTIATE_TEST_SUITE_P(objects, ep_faults, ::testing::ValuesIn(objects()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evmm::test
