// SPDX-License-Identifier: Apache-2.0
// The parts of examples/01_moe_exchange that need neither ranks nor a driver.
#include "arithmetic.hpp"
#include "exchange_ops.hpp"
#include "picture.hpp"
#include "plan.hpp"
#include "reference.hpp"
#include "report.hpp"
#include "routing.hpp"

#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>
#include <set>
#include <string>
#include <vector>

namespace {

using namespace evmm::units;
using moe::bf16;
using testing::ElementsAre;
using testing::HasSubstr;

// --- numbers

TEST(moe_bf16, keeps_what_fits_exactly) {
  for (const float value : {0.0f, -0.0f, 1.0f, -2.5f, 0.0078125f, -0x1.0p127f}) {
    EXPECT_EQ(std::bit_cast<std::uint32_t>(moe::to_float(moe::to_bf16(value))),
              std::bit_cast<std::uint32_t>(value));
  }
}

TEST(moe_bf16, rounds_to_nearest_and_ties_to_even) {
  // Between 1 (0x3f80) and the next, 1.0078125 (0x3f81), lies the tie 1.00390625.
  EXPECT_EQ(moe::to_bf16(1.00390625f).bits, 0x3f80);
  EXPECT_EQ(moe::to_bf16(std::nextafter(1.00390625f, 2.0f)).bits, 0x3f81);
  EXPECT_EQ(moe::to_bf16(std::nextafter(1.00390625f, 0.0f)).bits, 0x3f80);
  // Between 0x3f81 and 0x3f82 the tie goes up, to the even one.
  EXPECT_EQ(moe::to_bf16(1.01171875f).bits, 0x3f82);
  EXPECT_EQ(moe::to_bf16(-1.01171875f).bits, 0xbf82);
}

TEST(moe_bf16, overflows_to_infinity_and_keeps_nan) {
  EXPECT_EQ(moe::to_bf16(std::numeric_limits<float>::max()).bits, 0x7f80);
  EXPECT_EQ(moe::to_bf16(std::numeric_limits<float>::infinity()).bits, 0x7f80);
  // A NaN whose mantissa lies in the lower half only must not become an infinity.
  EXPECT_TRUE(std::isnan(moe::to_float(moe::to_bf16(std::bit_cast<float>(0x7f800001u)))));
}

TEST(moe_tokens, depend_on_seed_token_and_column) {
  std::set<std::vector<std::uint16_t>> seen;
  for (const std::uint64_t seed : {1u, 2u}) {
    for (std::uint64_t token = 0; token < 64; ++token) {
      std::vector<std::uint16_t> bits;
      for (int column = 0; column < 32; ++column) {
        const bf16 value = moe::token_value(seed, token, column);
        bits.push_back(value.bits);
        const float size = std::abs(moe::to_float(value));
        EXPECT_GE(size, 0x1.0p-7f);
        EXPECT_LT(size, 2.0f);
      }
      seen.insert(bits);
    }
  }
  EXPECT_EQ(seen.size(), 128u);
}

// --- plan

TEST(moe_placement, spreads_experts_evenly_and_in_order) {
  for (const auto& [experts, ranks] :
       {std::pair{60, 4}, {7, 3}, {5, 4}, {2, 4}, {256, 8}, {1, 1}, {61, 72}}) {
    const moe::expert_placement placement{experts, ranks};
    EXPECT_EQ(placement.first(0), 0);
    EXPECT_EQ(placement.first(ranks), experts);
    for (int r = 0; r < ranks; ++r) {
      EXPECT_LE(placement.count(r), placement.most());
      EXPECT_GE(placement.count(r), experts / ranks);
      for (int e = placement.first(r); e < placement.first(r + 1); ++e) {
        EXPECT_EQ(placement.rank_of(e), r) << "expert " << e << " of " << experts;
      }
    }
  }
}

TEST(moe_split, deals_each_token_out_once) {
  const moe::work_split split{.trace_tokens = 4386, .ranks = 4, .steps = 3};
  std::uint64_t next = 0;
  for (int s = 0; s < 3; ++s) {
    for (int r = 0; r < 4; ++r) {
      EXPECT_EQ(split.of(s, r).first, next);
      next += split.of(s, r).count;
      EXPECT_LE(split.of(s, r).count, split.most_in_rank());
    }
    EXPECT_LE(split.of(s).count, split.most_in_step());
  }
  EXPECT_EQ(next, 4386u);
}

TEST(moe_split, runs_on_when_tokens_are_given) {
  const moe::work_split split{.trace_tokens = 10, .ranks = 2, .steps = 4, .tokens_each = 6};
  EXPECT_EQ(split.of(3, 1).first, 42u);
  EXPECT_EQ(split.of(3, 1).count, 6u);
  EXPECT_EQ(split.most_in_step(), 12u);
}

TEST(moe_plan, packs_rows_by_expert_and_then_by_source) {
  // Two ranks, three experts: rank 0 holds expert 0, rank 1 holds 1 and 2.
  const moe::expert_placement placement{3, 2};
  const std::vector<std::int32_t> ids0 = {0, 1, 2, 0};
  const std::vector<std::int32_t> ids1 = {2, 1, 1, 2};
  auto counts = moe::count_rows(ids0, 3);
  const auto counts1 = moe::count_rows(ids1, 3);
  EXPECT_THAT(counts, ElementsAre(2, 1, 1));
  counts.insert(counts.end(), counts1.begin(), counts1.end());
  const moe::exchange_plan plan(placement, counts);

  EXPECT_EQ(plan.rows_at(0), 2u);
  EXPECT_EQ(plan.rows_at(1), 6u);
  EXPECT_EQ(plan.most_rows(), 6u);
  EXPECT_EQ(plan.total_rows(), 8u);
  EXPECT_THAT(plan.expert_starts(0), ElementsAre(0, 2));
  EXPECT_THAT(plan.expert_starts(1), ElementsAre(0, 3, 6));
  using target = moe::row_target;
  EXPECT_THAT(plan.targets(0, ids0),
              ElementsAre(target{0, 0}, target{1, 0}, target{1, 3}, target{0, 1}));
  EXPECT_THAT(plan.targets(1, ids1),
              ElementsAre(target{1, 4}, target{1, 1}, target{1, 2}, target{1, 5}));
}

TEST(moe_plan, gives_every_row_a_place_of_its_own_and_the_step_its_expert) {
  const moe::expert_placement placement{10, 4};
  const auto trace =
      moe::generate_routing({.experts = 10, .top_k = 3, .tokens = 400, .skew = 1.5, .seed = 5});
  const auto ids_of = [&](int rank) {
    return std::span(trace.ids).subspan(static_cast<std::size_t>(rank) * 300, 300);
  };
  std::vector<std::uint32_t> counts;
  for (int r = 0; r < 4; ++r) {
    const auto mine = moe::count_rows(ids_of(r), 10);
    counts.insert(counts.end(), mine.begin(), mine.end());
  }
  const moe::exchange_plan plan(placement, counts);
  std::set<std::pair<int, std::uint32_t>> taken;
  for (int r = 0; r < 4; ++r) {
    const auto targets = plan.targets(r, ids_of(r));
    for (std::size_t i = 0; i < targets.size(); ++i) {
      const auto at = targets[i];
      EXPECT_TRUE(taken.insert({at.rank, at.row}).second);
      EXPECT_LT(at.row, plan.rows_at(at.rank));
      const auto starts = plan.expert_starts(at.rank);
      moe::exchange_step step;
      step.first_expert = placement.first(at.rank);
      step.local_experts = placement.count(at.rank);
      step.expert_starts = starts.data();
      EXPECT_EQ(step.expert_of(at.row), ids_of(r)[i]);
    }
  }
  EXPECT_EQ(taken.size(), plan.total_rows());
}

evmm::segment part(std::size_t offset, std::size_t bytes, evmm::tier kind) {
  return {.offset = offset, .bytes = bytes, .where = {kind, 0}};
}

TEST(moe_traffic, counts_each_byte_in_the_tier_it_lies_in) {
  const std::vector<evmm::segment> segments = {part(0, 100, evmm::tier::device),
                                               part(100, 50, evmm::tier::host),
                                               part(150, 50, evmm::tier::device)};
  const auto split = moe::split_by_tier(segments, 90, 160);
  EXPECT_EQ(split.device, 20u);
  EXPECT_EQ(split.host, 50u);

  // Two ranks, two experts; rank 1 receives 1 + 3 rows of 40 bytes from offset 20: 80 bytes fit
  // before 100, 50 lie in the host segment, 30 after it.
  const moe::exchange_plan plan({2, 2}, {0, 1, 2, 3});
  const std::array by_rank = {segments, segments};
  const auto traffic = moe::count_traffic(plan, by_rank, 20, 40);
  EXPECT_EQ(traffic.at(0, 0).total(), 0u);
  EXPECT_EQ(traffic.at(1, 0).device, 80u);
  EXPECT_EQ(traffic.at(0, 1).device, 40u);
  EXPECT_EQ(traffic.at(1, 1).device, 70u);
  EXPECT_EQ(traffic.into(1).host, 50u);
  EXPECT_EQ(traffic.total().total(), 240u);
  EXPECT_EQ(traffic.own().total(), 120u);
}

TEST(moe_layout, keeps_flags_counts_and_rows_apart_and_aligned) {
  const auto layout = moe::region_layout::of(8, 256);
  EXPECT_GE(layout.counts, layout.flags + 8 * 8);
  EXPECT_GE(layout.rows, layout.counts + 8 * 256 * 4);
  EXPECT_EQ(layout.counts % 128, 0u);
  EXPECT_EQ(layout.rows % 4096, 0u);
}

// --- reference

TEST(moe_reference, agrees_with_a_case_computed_by_hand) {
  // expert(0): y = x * 1 - 1; expert(1): y = x * (1 + 37/128) + (53/256 - 1).
  EXPECT_EQ(moe::stand_in_expert::of(0).scale, 1.0f);
  EXPECT_EQ(moe::stand_in_expert::of(0).shift, -1.0f);
  EXPECT_EQ(moe::stand_in_expert::of(1).scale, 1.2890625f);
  EXPECT_EQ(moe::stand_in_expert::of(1).shift, -0.79296875f);
  const std::vector<bf16> x = {moe::to_bf16(2.0f), moe::to_bf16(-1.0f)};
  const auto y = moe::reference_outputs(x, std::vector<std::int32_t>{0, 1},
                                        std::vector<float>{0.5f, 0.25f}, 2, 2);
  // x = 2: 1 and 1.78515625, the tie between 1.78125 (0x3fe4) and 1.7890625: to even, 1.78125;
  // sum 0.5 + 0.4453125 = 0.9453125, which bf16 holds.
  // x = -1: -2 and -2.08203125, rounded to -2.078125; sum -1 - 0.51953125 = -1.51953125, the tie
  // between -1.515625 (0xbfc2) and -1.5234375 (0xbfc3): to even.
  ASSERT_EQ(y.size(), 2u);
  EXPECT_EQ(moe::to_float(y[0]), 0.9453125f);
  EXPECT_EQ(moe::to_float(y[1]), -1.515625f);
}

TEST(moe_reference, tells_experts_and_tokens_apart) {
  const auto x = moe::make_tokens(1, {.first = 5, .count = 2}, 64);
  const std::vector<float> one = {1.0f, 1.0f};
  const auto a = moe::reference_outputs(x, std::vector<std::int32_t>{3, 4}, one, 1, 64);
  const auto b = moe::reference_outputs(x, std::vector<std::int32_t>{4, 3}, one, 1, 64);
  EXPECT_GT(moe::count_mismatches(a, b), 100u);
  EXPECT_EQ(moe::count_mismatches(a, a), 0u);
  EXPECT_EQ(moe::count_mismatches(a, std::span(a).first(10)), a.size());
}

// --- report

moe::run_record small_run() {
  moe::run_record run;
  run.ranks = 2;
  run.steps = 1;
  run.routing = "a < b & c";
  run.rank_lines = {"here", "there"};
  run.row_bytes = 1_MiB;
  run.device_capacity = 4_MiB;
  run.most_region_bytes = 8_MiB;
  moe::step_record step;
  step.tokens = 4;
  step.rows = 8;
  step.seconds = {0.1, 0.5, 0.1, 0.25};
  step.traffic = moe::traffic_matrix(2);
  step.traffic.at(0, 1) = {.device = 3_MiB, .host = 1_MiB};
  step.traffic.at(1, 1) = {.device = 4_MiB, .host = 0};
  run.steps_done.push_back(step);
  const std::vector<evmm::segment> segments = {part(0, 4_MiB, evmm::tier::device),
                                               part(4_MiB, 4_MiB, evmm::tier::host)};
  run.moments.push_back({.label = "step 0",
                         .epoch = 2,
                         .region_bytes = 8_MiB,
                         .segments = {segments, segments},
                         .used = {0, 5_MiB}});
  return run;
}

TEST(moe_report, computes_rates_of_one_rank) {
  const auto rate = small_run().rate(moe::phase::dispatch);
  EXPECT_DOUBLE_EQ(rate.logical, 8.0 * (1 << 20) / 2 / 0.5);
  EXPECT_DOUBLE_EQ(rate.physical, 4.0 * (1 << 20) / 2 / 0.5);
  EXPECT_DOUBLE_EQ(moe::median({3, 1, 2}), 2);
  EXPECT_DOUBLE_EQ(moe::median({4, 1, 2, 3}), 2.5);
}

TEST(moe_report, says_what_was_verified_and_what_failed) {
  auto run = small_run();
  EXPECT_THAT(moe::verdict(run), testing::StartsWith("verified: 2 ranks, 1 steps, 4 tokens"));
  EXPECT_THAT(moe::verdict(run), HasSubstr("8.0 MiB a rank, larger than the 4.0 MiB device"));
  EXPECT_THAT(moe::verdict(run), HasSubstr("1.0 MiB spilled"));
  run.device_capacity = 16_MiB;
  EXPECT_THAT(moe::verdict(run), HasSubstr("no larger than the 16.0 MiB device"));
  run.device_cap = 2_MiB;
  EXPECT_THAT(moe::verdict(run), HasSubstr("larger than the 2.0 MiB cap"));
  run.steps_done[0].mismatches = 3;
  EXPECT_THAT(moe::verdict(run), testing::StartsWith("FAILED: 3 "));
  EXPECT_THAT(moe::report(run), HasSubstr("peer HOST"));
  EXPECT_THAT(moe::to_json(run), HasSubstr("\"mismatches\": 3"));
}

TEST(moe_picture, is_a_document_with_its_words_escaped) {
  const std::string svg = moe::draw(small_run());
  EXPECT_THAT(svg, testing::StartsWith("<svg "));
  EXPECT_THAT(svg, testing::EndsWith("</svg>\n"));
  EXPECT_THAT(svg, HasSubstr("a &lt; b &amp; c"));
  EXPECT_THAT(svg, testing::Not(HasSubstr("nan")));
}

}  // namespace
