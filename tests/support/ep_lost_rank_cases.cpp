// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"
#include "tests/support/ep_low_latency_rank.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/ep/low_latency.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

// What low-latency exchanges do without a rank.

namespace evmm::test {

using ::testing::HasSubstr;

namespace {

using low_latency = ep::low_latency_exchange;

void a_rank_that_does_not_come_is_left_out(const rank_context& at) {
  if (at.ranks->size() == 1 || at.ranks->node_count() > 1) return;
  auto script =
      script_for(at, {.experts = 2, .top_k = 3, .hidden = 128, .max_tokens = 20, .sms = 2});
  script.seed = 80;
  low_latency_rank mine(at, script.options, std::chrono::milliseconds(400));
  mine.run(script);
  const int lost = at.ranks->size() - 1;
  const std::uint64_t mask = std::uint64_t{1} << lost;
  at.ranks->barrier("one rank leaves");
  if (mine.me() != lost) {
    for (std::uint64_t round = 0; round < 4; ++round) {
      script.seed = 81 + round;
      low_latency::round of;
      const auto begin = std::chrono::steady_clock::now();
      const auto got = mine.exchange().dispatch(mine.upload(script), of, mine.stream());
      mine.expect_received(script, got, mask);
      mine.write_outputs(script, of, got);
      mine.exchange().combine(of, mine.out(0), nullptr, mine.stream());
      EXPECT_EQ(mine.sums(script, 0), combined(script, mine.me(), {}, true, mask));
      EXPECT_EQ(mine.exchange().dead_ranks(), mask);
      // Its death costs one timeout, not one a call.
      const auto took = std::chrono::steady_clock::now() - begin;
      if (round > 0 && at.on->info().kind == driver_kind::cuda) {
        EXPECT_LT(took, std::chrono::milliseconds(300));
      }
    }
  }
  at.ranks->barrier("the others are done");
}

/// What it then stores is nobody's: the others have gone on without it.
void a_rank_that_comes_too_late_tells_nothing(const rank_context& at) {
  if (at.ranks->size() == 1 || at.ranks->node_count() > 1) return;
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    auto script = script_for(at, {.experts = 2,
                                  .top_k = 3,
                                  .hidden = 128,
                                  .arranged = arranged,
                                  .max_tokens = 20,
                                  .sms = 2});
    script.seed = 90;
    script.distinct = true;
    low_latency_rank mine(at, script.options, std::chrono::milliseconds(400));
    mine.run(script);
    const int late = at.ranks->size() - 1;
    const std::uint64_t mask = std::uint64_t{1} << late;
    const bool me = mine.me() == late;
    low_latency::round of;
    ep::low_latency_received got;
    const auto dispatch = [&] {
      got = mine.exchange().dispatch(mine.upload(script), of, mine.stream());
      at.on->synchronize(mine.stream());
    };
    at.ranks->barrier("one rank is late");
    if (!me) dispatch();
    at.ranks->barrier("the others have gone on");
    if (me) dispatch();
    at.ranks->barrier("it has come");
    if (!me) {
      mine.expect_received(script, got, mask);
      mine.write_outputs(script, of, got, mask);
      mine.exchange().combine(of, mine.out(0), nullptr, mine.stream());
      EXPECT_EQ(mine.sums(script, 0), combined(script, mine.me(), {}, true, mask));
      EXPECT_EQ(mine.exchange().dead_ranks(), mask);
    }
    at.ranks->barrier("the others are done");
  }
}

/// The channel tells those that have its index on other nodes. All others go on without them.
void lose_a_rank_after(const rank_context& at, int rounds) {
  if (at.ranks->node_count() == 1) return;
  auto script =
      script_for(at, {.experts = 2, .top_k = 3, .hidden = 128, .max_tokens = 20, .sms = 2});
  script.seed = 180;
  low_latency_rank mine(at, script.options, std::chrono::milliseconds(1500));
  for (int round = 0; round < rounds; ++round) mine.run(script);
  const int lost = at.ranks->size() - 1;
  const int index_of_lost =
      static_cast<int>(script.ranks_of(script.node_of[static_cast<std::size_t>(lost)]).size()) - 1;
  std::uint64_t rail = 0;
  for (int r = 0; r < at.ranks->size(); ++r) {
    const auto mates = script.ranks_of(script.node_of[static_cast<std::size_t>(r)]);
    if (mates[static_cast<std::size_t>(index_of_lost)] == r) rail |= std::uint64_t{1} << r;
  }
  const bool on_rail = (rail >> mine.me() & 1) != 0;
  const auto usual = at.ranks->timeout();
  at.ranks->barrier("one rank leaves");
  if (on_rail && mine.me() != lost) {
    at.ranks->set_timeout(std::chrono::milliseconds(300));
    script.seed = 181;
    low_latency::round of;
    mine.exchange().dispatch(mine.upload(script), of, mine.stream());
    EXPECT_THAT(thrown_by([&] { mine.across()->synchronize(mine.stream()); }),
                HasSubstr("rank " + std::to_string(lost)));
    EXPECT_THAT(thrown_by([&] { mine.exchange().check(); }), HasSubstr("timed_out"));
    EXPECT_THAT(thrown_by([&] { mine.exchange().issue_combine(of, mine.stream()); }),
                HasSubstr("timed_out"));
    at.ranks->set_timeout(usual);
  }
  for (std::uint64_t round = 0; round < 3 && !on_rail; ++round) {
    script.seed = 181 + round;
    // At first the others of the rail are there, with what they got of it: nothing on two nodes.
    const std::uint64_t absent = round == 0 ? std::uint64_t{1} << lost : rail;
    const bool certain = round > 0 || at.ranks->node_count() == 2;
    low_latency::round of;
    const auto got = mine.exchange().dispatch(mine.upload(script), of, mine.stream());
    if (certain) {
      mine.expect_received(script, got, absent);
      mine.write_outputs(script, of, got, absent);
    }
    mine.exchange().combine(of, mine.out(0), nullptr, mine.stream());
    const auto sums = mine.sums(script, 0);
    if (certain) {
      EXPECT_EQ(sums, combined(script, mine.me(), {}, true, rail));
    }
    EXPECT_EQ(mine.exchange().dead_ranks(), std::uint64_t{1} << index_of_lost);
    mine.exchange().check();
  }
  at.ranks->barrier("the others are done");
  at.ranks->set_timeout(std::chrono::seconds(2));
  EXPECT_NE(thrown_by([&] { mine.across()->close(); }), "");
  at.ranks->set_timeout(usual);
}

void a_rank_that_is_lost_ends_its_rail(const rank_context& at) {
  lose_a_rank_after(at, 2);
}

/// Into one set of buffers nothing ever came.
void a_rank_that_is_lost_early_ends_its_rail(const rank_context& at) {
  lose_a_rank_after(at, 1);
}

}  // namespace

const std::vector<symmetric_case>& lost_rank_cases() {
#define EVMM_CASE(name) \
  { #name, &(name) }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(a_rank_that_does_not_come_is_left_out),
      EVMM_CASE(a_rank_that_comes_too_late_tells_nothing),
      EVMM_CASE(a_rank_that_is_lost_ends_its_rail),
      EVMM_CASE(a_rank_that_is_lost_early_ends_its_rail),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
