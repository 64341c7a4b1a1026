// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/table/hot_rows.hpp"
#include "tests/support/table_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <set>
#include <string>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

struct threads_case {
  int ranks;
  symmetric_case tried;
  friend void PrintTo(const threads_case& run, std::ostream* out) {
    *out << run.tried.name << " on " << run.ranks << " ranks";
  }
};
class table_threads : public ::testing::TestWithParam<threads_case> {};

TEST_P(table_threads, holds) {
  const int size = GetParam().ranks;
  const auto bootstraps = make_thread_bootstraps(size);
  const auto thrown = run_ranks(size, [&](int rank) {
    GetParam().tried.run({.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({.device_bytes = 4_GiB, .host_bytes = 4_GiB})});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

std::vector<threads_case> all_cases() {
  std::vector<threads_case> all;
  for (const int ranks : {1, 2, 3}) {
    for (const symmetric_case& tried : table_cases()) all.push_back({ranks, tried});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(ranks, table_threads, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) {
                           return info.param.tried.name + "_" + std::to_string(info.param.ranks);
                         });

TEST(table_order, pays_off_where_translations_would_be_missed) {
  EXPECT_FALSE(ep::worth_ordering(1 << 22, 256, 512_MiB)) << "within reach";
  EXPECT_TRUE(ep::worth_ordering(1 << 18, 256, 1_GiB));
  EXPECT_TRUE(ep::worth_ordering(1 << 16, 256, 16_GiB));
  EXPECT_TRUE(ep::worth_ordering(1 << 18, 1024, 16_GiB));
  EXPECT_FALSE(ep::worth_ordering(1 << 10, 256, 16_GiB)) << "hardly two rows a page";
  EXPECT_FALSE(ep::worth_ordering(1 << 12, 4096, 16_GiB)) << "the link is the limit anyway";
  EXPECT_TRUE(ep::worth_ordering(1 << 18, 16384, 16_GiB)) << "costs nothing beside the copy";
}

TEST(table_order, sorts_by_whole_digits) {
  const auto bits = [](std::uint64_t keys) {
    const ep::key_bits by = ep::bits_to_sort(keys);
    return std::pair{by.first, by.last};
  };
  EXPECT_EQ(bits(1), std::pair(0, 1));
  EXPECT_EQ(bits(2), std::pair(0, 1));
  EXPECT_EQ(bits(3), std::pair(0, 2));
  EXPECT_EQ(bits(1 << 8), std::pair(0, 8));
  EXPECT_EQ(bits((1 << 8) + 1), std::pair(1, 9)) << "one digit instead of two";
  EXPECT_EQ(bits(1 << 24), std::pair(0, 24));
  EXPECT_EQ(bits(1 << 26), std::pair(2, 26)) << "three digits instead of four";
  EXPECT_EQ(bits(1 << 27), std::pair(0, 27)) << "too many rows would be one";
  EXPECT_EQ(bits((std::uint64_t{1} << 32) - 1), std::pair(0, 32));
}

TEST(table_order, begins_with_the_ranks_own_rows) {
  ep::table_shape shape;
  shape.view = {.rows = 10, .rows_per_rank = 4, .row_bytes = 128, .rank = 1, .ranks = 3};
  std::set<std::uint32_t> keys;
  for (std::uint64_t row = 0; row < 10; ++row) {
    const std::uint32_t key = shape.key_of(row);
    EXPECT_EQ(shape.row_of(key), row);
    EXPECT_LT(key, shape.keys());
    keys.insert(key);
  }
  EXPECT_EQ(keys.size(), 10u);
  EXPECT_EQ(shape.key_of(4), 0u);
  EXPECT_EQ(shape.key_of(0), 8u);
}

/// A cache of one set, without rows.
struct one_set {
  one_set() {
    shape.base = reinterpret_cast<char*>(tags);
    shape.sets = 1;
  }
  std::uint64_t tags[ep::k_ways] = {};
  ep::table_shape shape;
};

TEST(table_cache, replaces_what_was_not_wanted_for_longest) {
  one_set cache;
  for (std::uint32_t row = 0; row < ep::k_ways; ++row) {
    EXPECT_EQ(ep::find_copy(cache.shape, row, row + 1), ep::k_no_row);
    EXPECT_NE(ep::claim_copy(cache.shape, row, row + 1), ep::k_no_row);
  }
  // Row 0 is the oldest, but wanted again.
  const std::uint32_t kept = ep::find_copy(cache.shape, 0, 9);
  EXPECT_NE(kept, ep::k_no_row);
  const std::uint32_t slot = ep::find_copy(cache.shape, 1, 2);
  EXPECT_EQ(ep::claim_copy(cache.shape, 100, 9), slot) << "of row 1";
  EXPECT_EQ(ep::find_copy(cache.shape, 1, 9), ep::k_no_row);
  EXPECT_EQ(ep::find_copy(cache.shape, 0, 9), kept);
}

TEST(table_cache, keeps_what_is_wanted_in_the_same_round) {
  one_set cache;
  for (std::uint32_t row = 0; row < ep::k_ways; ++row) {
    EXPECT_NE(ep::claim_copy(cache.shape, row, 1), ep::k_no_row);
  }
  EXPECT_EQ(ep::claim_copy(cache.shape, 50, 1), ep::k_no_row) << "all were filled just now";
  EXPECT_EQ(ep::claim_copy(cache.shape, 3, 2), ep::k_no_row) << "it is there already";
  EXPECT_NE(ep::claim_copy(cache.shape, 50, 2), ep::k_no_row);
}

TEST(table_cache, forgets_rows) {
  one_set cache;
  for (std::uint32_t row = 10; row < 14; ++row) ep::claim_copy(cache.shape, row, 1);
  ep::drop_copies(cache.shape, 0, 11);
  EXPECT_EQ(ep::find_copy(cache.shape, 11, 2), ep::k_no_row);
  EXPECT_NE(ep::find_copy(cache.shape, 12, 2), ep::k_no_row);
  for (std::uint32_t slot = 0; slot < ep::k_ways; ++slot) {
    ep::drop_slot(cache.shape, 0, slot, 12, 1);
  }
  EXPECT_EQ(ep::find_copy(cache.shape, 12, 2), ep::k_no_row);
  EXPECT_NE(ep::find_copy(cache.shape, 10, 2), ep::k_no_row);
  EXPECT_NE(ep::find_copy(cache.shape, 13, 2), ep::k_no_row);
}

}  // namespace
}  // namespace evmm::test
