// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/segment_plan.hpp"

#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <vector>

namespace evmm {
namespace {

using namespace units;

TEST(segment_plan, is_exact_while_slots_are_plenty) {
  const segment_limits limits{64_GiB, 2_MiB, 32, 8_GiB};
  std::size_t size = 0;
  for (std::size_t n = 0; n < 20; ++n) {
    const std::size_t step = next_segment_bytes(limits, size, n, 1_GiB);
    EXPECT_EQ(step, 1_GiB) << "segment " << n;
    size += step;
  }
}

TEST(segment_plan, reaches_the_reservation_within_the_bound_for_any_small_step) {
  for (const std::size_t reserved : {1_GiB, 64_GiB, 141_GiB}) {
    for (const std::size_t max_segments : {std::size_t{18}, std::size_t{32}, std::size_t{64}}) {
      const segment_limits limits{reserved, 2_MiB, max_segments, 8_GiB};
      // Half-size steps multiply by 1.5; this start leaves just enough of them.
      std::size_t size = reserved / 400 + 2_MiB;
      std::size_t segments = 1;
      while (size < reserved && segments < max_segments) {
        const std::size_t step = next_segment_bytes(limits, size, segments, 2_MiB);
        EXPECT_LE(step, std::max(2_MiB, size / 2 + 2_MiB)) << "never more than half the size";
        size += step;
        ++segments;
      }
      EXPECT_EQ(size, reserved) << reserved << " in " << max_segments;
    }
  }
}

TEST(segment_plan, cuts_what_is_large_while_slots_are_plenty) {
  const segment_limits limits{128_GiB, 2_MiB, 32, 8_GiB};
  EXPECT_EQ(plan_growth(limits, 0, 0, 8_GiB), std::vector<std::size_t>{8_GiB});
  EXPECT_EQ(plan_growth(limits, 0, 0, 64_GiB), std::vector<std::size_t>(8, 8_GiB));
  const auto uneven = plan_growth(limits, 0, 0, 20_GiB + 2_MiB);
  ASSERT_EQ(uneven.size(), 3u);
  EXPECT_EQ(uneven[0] + uneven[1] + uneven[2], 20_GiB + 2_MiB);
  EXPECT_LE(uneven[0], 8_GiB);
  EXPECT_LE(plan_growth(limits, 40_GiB, 26, 80_GiB).size(), 3u) << "half of the slots stay free";
  EXPECT_EQ(plan_growth(limits, 40_GiB, 31, 80_GiB).size(), 1u) << "the last slot takes it whole";
}

TEST(segment_plan, refuses_what_cannot_be) {
  const segment_limits limits{8_MiB, 2_MiB, 2, 8_GiB};
  EXPECT_THROW(next_segment_bytes(limits, 0, 0, 0), invalid_argument);
  EXPECT_THROW(next_segment_bytes(limits, 4_MiB, 1, 5_MiB), invalid_argument);
  EXPECT_THROW(next_segment_bytes(limits, 4_MiB, 2, 2_MiB), invalid_argument);
  EXPECT_THROW(round_up(std::size_t(-1), 2_MiB), invalid_argument);
}

TEST(segment_plan, counts_the_tail_that_fits) {
  const std::vector<std::size_t> sizes = {8, 4, 2};
  EXPECT_EQ(tail_segments_within(sizes, 1), 0u);
  EXPECT_EQ(tail_segments_within(sizes, 5), 1u);
  EXPECT_EQ(tail_segments_within(sizes, 6), 2u);
  EXPECT_EQ(tail_segments_within(sizes, 100), 3u);
}

}  // namespace
}  // namespace evmm
