// SPDX-License-Identifier: Apache-2.0
// What the EP benchmark holds the exchange to: where tokens go, and how much of it spills.
#include "tests/bench/ep_routing.hpp"

#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <utility>
#include <vector>

namespace evmm::bench {
namespace {

using testing::HasSubstr;

// Experts 0 and 1 are chosen by six tokens, the others by one.
moe::routing busy_pair() {
  std::string text = "0 1,0.5 0.25\n2 3,0.5 0.25\n4 5,0.5 0.25\n";
  for (int i = 0; i < 5; ++i) text += "0 1,0.5 0.25\n";
  return moe::parse_routing(text, "busy_pair", 6);
}

TEST(EpRouting, TokensGoToTheRanksOfTheirExperts) {
  const ep_routing routing(busy_pair(), 2, 3, placement::in_order);
  EXPECT_EQ(routing.experts(), 6);
  EXPECT_EQ(routing.local_experts(), 3);
  // Rank 0 sends lines 0-2, rank 1 lines 3-5, which are alike. Experts 0-2 are at rank 0.
  EXPECT_THAT(routing.ids(0), testing::ElementsAre(0, 1, 2, 3, 4, 5));
  EXPECT_THAT(routing.ids(1), testing::ElementsAre(0, 1, 0, 1, 0, 1));
  EXPECT_THAT(routing.masks(0), testing::ElementsAre(0b01, 0b11, 0b10));
  EXPECT_THAT(routing.masks(1), testing::ElementsAre(0b01, 0b01, 0b01));
  EXPECT_EQ(routing.rows(0, 0), 2u);
  EXPECT_EQ(routing.rows(0, 1), 2u);
  EXPECT_EQ(routing.rows(1, 0), 3u);
  EXPECT_EQ(routing.rows(1, 1), 0u);
  EXPECT_EQ(routing.sent(0), 4u);
  EXPECT_EQ(routing.received(0), 5u);
  EXPECT_EQ(routing.received_at_most(), 5u);
  EXPECT_EQ(routing.received_in_all(), 7u);
}

TEST(EpRouting, StartsAgainWhereTheRoutingEnds) {
  const ep_routing routing(busy_pair(), 3, 3, placement::in_order);
  EXPECT_THAT(routing.ids(2), testing::ElementsAre(0, 1, 0, 1, 0, 1));  // lines 6, 7, 0
  EXPECT_THAT(routing.weights(2), testing::ElementsAre(0.5f, 0.25f, 0.5f, 0.25f, 0.5f, 0.25f));
}

TEST(EpRouting, ExpertsAreRoundedUpToTheRanks) {
  const ep_routing routing(busy_pair(), 4, 1, placement::in_order);
  EXPECT_EQ(routing.experts(), 8);
  EXPECT_EQ(routing.local_experts(), 2);
}

TEST(EpRouting, PlacementsRenumberTheExperts) {
  for (const placement where : {placement::in_order, placement::round_robin, placement::balanced}) {
    const ep_routing routing(busy_pair(), 2, 3, where);
    const auto ids = routing.ids(0);  // names each expert once
    EXPECT_EQ(std::set<std::int64_t>(ids.begin(), ids.end()).size(), 6u) << to_string(where);
    EXPECT_THAT(ids, testing::Each(testing::AllOf(testing::Ge(0), testing::Lt(6))));
  }
  const ep_routing by_turns(busy_pair(), 2, 3, placement::round_robin);
  EXPECT_THAT(by_turns.masks(0), testing::Each(0b11));  // neighbours are at different ranks
}

TEST(EpRouting, BalancedPutsBusyExpertsOnDifferentRanks) {
  const ep_routing in_order(busy_pair(), 2, 4, placement::in_order);
  const ep_routing balanced(busy_pair(), 2, 4, placement::balanced);
  EXPECT_EQ(in_order.received(0), 7u);
  EXPECT_EQ(in_order.received(1), 2u);
  EXPECT_EQ(balanced.received(0), balanced.received(1));
}

// Rows as NCCL's peer moves them: sent in order of receivers, received in order of sources.
TEST(EpRouting, OrderOfSendingLeadsToTheOrderOfReceiving) {
  constexpr int ranks = 3;
  const auto chosen =
      moe::generate_routing({.experts = 12, .top_k = 2, .tokens = ranks * 40, .skew = 1});
  const ep_routing routing(chosen, ranks, 40, placement::in_order);
  using row = std::pair<int, std::int32_t>;  // source, token
  std::vector<std::vector<row>> received(ranks);
  for (int from = 0; from < ranks; ++from) {
    const auto tokens = routing.send_tokens(from);
    ASSERT_EQ(tokens.size(), routing.sent(from));
    for (int to = 0; to < ranks; ++to) {
      auto& at = received[static_cast<std::size_t>(to)];
      ASSERT_EQ(at.size(), routing.received_before(to, from));
      for (std::size_t i = 0; i < routing.rows(from, to); ++i) {
        at.emplace_back(from, tokens[routing.sent_before(from, to) + i]);
      }
    }
    const auto slots = routing.send_slots(from);
    for (std::size_t t = 0; t < routing.tokens(); ++t) {
      for (int to = 0; to < ranks; ++to) {
        const std::int32_t slot = slots[t * ranks + static_cast<std::size_t>(to)];
        ASSERT_EQ(slot >= 0, routing.goes(from, t, to));
        if (slot < 0) continue;
        EXPECT_EQ(tokens[static_cast<std::size_t>(slot)], static_cast<std::int32_t>(t));
        EXPECT_GE(static_cast<std::size_t>(slot), routing.sent_before(from, to));
        EXPECT_LT(static_cast<std::size_t>(slot), routing.sent_before(from, to + 1));
      }
    }
  }
  for (int to = 0; to < ranks; ++to) {
    std::vector<row> expected;
    for (int from = 0; from < ranks; ++from) {
      for (std::size_t t = 0; t < routing.tokens(); ++t) {
        if (routing.goes(from, t, to)) expected.emplace_back(from, static_cast<std::int32_t>(t));
      }
    }
    EXPECT_EQ(received[static_cast<std::size_t>(to)], expected);
  }
}

TEST(EpRouting, DeviceRowsFollowFromTheShareThatSpills) {
  const ep_routing routing(busy_pair(), 2, 4, placement::in_order);  // 7 and 2 rows
  EXPECT_EQ(routing.spilled(7), 0u);
  EXPECT_EQ(routing.spilled(5), 2u);
  EXPECT_EQ(routing.spilled(1), 7u);
  EXPECT_EQ(routing.device_rows_for(0), 7u);
  EXPECT_EQ(routing.device_rows_for(2.1 / 9), 5u);
  EXPECT_EQ(routing.device_rows_for(2.9 / 9), 5u);
  EXPECT_EQ(routing.device_rows_for(1), 0u);
}

TEST(EpRouting, SharesOfAGeneratedRoutingAreMet) {
  const auto chosen =
      moe::generate_routing({.experts = 64, .top_k = 8, .tokens = 4 * std::size_t{512}, .skew = 1});
  const ep_routing routing(chosen, 4, 512, placement::in_order);
  const auto all = static_cast<double>(routing.received_in_all());
  for (const double share : {0.05, 0.1, 0.25, 0.5}) {
    const std::size_t rows = routing.device_rows_for(share);
    EXPECT_LE(static_cast<double>(routing.spilled(rows)), share * all);
    EXPECT_GT(static_cast<double>(routing.spilled(rows - 1)), share * all);
  }
}

TEST(EpRouting, RefusesWhatCannotBe) {
  const auto refused = [](const moe::routing& chosen, int ranks) -> std::string {
    try {
      const ep_routing made(chosen, ranks, 1, placement::in_order);
    } catch (const invalid_argument& failure) {
      return failure.what();
    }
    return "nothing";
  };
  EXPECT_THAT(refused(busy_pair(), 0), HasSubstr("0 ranks"));
  EXPECT_THAT(refused(busy_pair(), 65), HasSubstr("65 ranks"));
  EXPECT_THAT(refused({}, 2), HasSubstr("no token"));
}

}  // namespace
}  // namespace evmm::bench
