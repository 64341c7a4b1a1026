// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

// Which block a request gets: rounding, pools by size, splitting, best fit, merging.

namespace evmm::test {

class allocator_size_contract : public allocator_contract {};

TEST_P(allocator_size_contract, nothing_is_given_for_0_bytes) {
  make();
  EXPECT_EQ(allocator->allocate(0), nullptr);
  allocator->free(nullptr);
  EXPECT_EQ(allocator->statistics().allocation.all.allocated, 0);
}

TEST_P(allocator_size_contract, one_exbibyte_is_refused_before_memory_is_asked_for) {
  make();
  for (const std::size_t bytes : {std::size_t{1} << 60, std::size_t(-1)}) {
    const std::string said = refusal([&] { (void)allocator->allocate(bytes); });
    EXPECT_TRUE(says(said, "1 EiB") && says(said, "invalid_argument")) << said;
  }
  EXPECT_EQ(allocator->statistics().num_ooms, 0);
  EXPECT_TRUE(says(refusal([&] { (void)allocator->allocate((std::size_t{1} << 60) - 1); }),
                   "out_of_memory"));
}

TEST_P(allocator_size_contract, sizes_and_addresses_are_multiples_of_512) {
  make();
  for (const auto& [bytes, rounded] : {std::pair<std::size_t, std::size_t>{1, 512},
                                       {511, 512},
                                       {512, 512},
                                       {513, 1024},
                                       {1_MiB + 1, 1_MiB + 512},
                                       {3_MiB - 1, 3_MiB}}) {
    void* const made = allocator->allocate(bytes);
    EXPECT_EQ(block_bytes(made), rounded) << bytes;
    EXPECT_EQ(at(made) % 512, 0u) << bytes;
    allocator->free(made);
  }
}

TEST_P(allocator_size_contract, divisions_round_up_between_powers_of_two) {
  make("roundup_power2_divisions:4");
  for (const auto& [bytes, rounded] : {std::pair<std::size_t, std::size_t>{700, 1024},
                                       {2048, 2048},
                                       {2049, 2560},
                                       {5000, 5120},
                                       {5121, 6144},
                                       {8_MiB + 1, 10_MiB},
                                       {8_MiB, 8_MiB}}) {
    void* const made = allocator->allocate(bytes);
    EXPECT_EQ(block_bytes(made), rounded) << bytes;
    allocator->free(made);
  }
}

TEST_P(allocator_size_contract, divisions_may_differ_by_size) {
  make("roundup_power2_divisions:[1:4,>:1]");
  void* const below = allocator->allocate(600000);
  void* const above = allocator->allocate(5_MiB + 1);
  EXPECT_EQ(block_bytes(below), 655360u) << "the first entry holds for what is smaller too";
  EXPECT_EQ(block_bytes(above), 5_MiB + 512) << "one division is none";
  free({below, above});
}

TEST_P(allocator_size_contract, small_requests_have_segments_of_their_own) {
  make(k_segments);
  void* const small = allocator->allocate(1_MiB);
  EXPECT_EQ(reserved(), 2_MiB);
  void* const large = allocator->allocate(1_MiB + 1);
  EXPECT_EQ(reserved(), 22_MiB) << "under 10 MiB a segment of 20 MiB is cut";
  const auto now = allocator->statistics();
  EXPECT_EQ(now.allocated_bytes.small_pool.current, 1_MiB);
  EXPECT_EQ(now.allocated_bytes.large_pool.current, 1_MiB + 512);
  EXPECT_EQ(now.reserved_bytes.small_pool.current, 2_MiB);
  EXPECT_EQ(now.segment.large_pool.current, 1);
  void* const beside = allocator->allocate(512);
  EXPECT_EQ(reserved(), 22_MiB);
  EXPECT_EQ(at(allocator->base_allocation(beside).base),
            at(allocator->base_allocation(small).base));
  void* const own = allocator->allocate(10_MiB);
  EXPECT_EQ(reserved(), 22_MiB) << "it fits into what is left";
  void* const more = allocator->allocate(11_MiB + 1);
  EXPECT_EQ(reserved(), 34_MiB) << "from 10 MiB on, up to a multiple of 2 MiB";
  free({small, large, beside, own, more});
}

TEST_P(allocator_size_contract, large_blocks_are_split_when_more_than_1_MiB_is_left) {
  make(k_segments);
  void* const first = allocator->allocate(9_MiB);
  void* const second = allocator->allocate(9_MiB + 512);
  EXPECT_EQ(block_bytes(first), 9_MiB);
  EXPECT_EQ(block_bytes(second), 9_MiB + 512) << "2 MiB less 512 B are left";
  void* const third = allocator->allocate(1_MiB + 512);
  EXPECT_EQ(block_bytes(third), 2_MiB - 512) << "less than 1 MiB would be left";
  EXPECT_EQ(reserved(), 20_MiB);
  free({first, second, third});
}

TEST_P(allocator_size_contract, expandable_blocks_are_split_down_to_512) {
  make();
  void* const first = allocator->allocate(4_MiB);
  allocator->free(first);
  void* const second = allocator->allocate(4_MiB - 512);
  EXPECT_EQ(second, first);
  EXPECT_EQ(block_bytes(second), 4_MiB - 512);
  EXPECT_EQ(allocator->cache_info().cached_bytes, 512u);
  allocator->free(second);
}

TEST_P(allocator_size_contract, blocks_of_max_split_size_are_not_split) {
  make("expandable_segments:False,max_split_size_mb:24");
  void* const big = allocator->allocate(40_MiB);
  allocator->free(big);
  void* const other = allocator->allocate(12_MiB);
  EXPECT_EQ(reserved(), 52_MiB) << "a smaller request leaves the big block alone";
  void* const again = allocator->allocate(30_MiB);
  EXPECT_EQ(again, big);
  EXPECT_EQ(block_bytes(again), 40_MiB) << "whole";
  free({other, again});
}

TEST_P(allocator_size_contract, a_segment_of_max_split_size_serves_what_it_was_made_for) {
  make("expandable_segments:False,max_split_size_mb:20");
  void* const small_part = allocator->allocate(5_MiB);
  EXPECT_EQ(reserved(), 20_MiB);
  EXPECT_EQ(block_bytes(small_part), 5_MiB);
  void* const rest = allocator->allocate(9_MiB);
  EXPECT_EQ(reserved(), 20_MiB) << "what is left is below the limit";
  void* const nearly = allocator->allocate(19_MiB + 1);
  EXPECT_EQ(block_bytes(nearly), 20_MiB) << "too little is left to split";
  EXPECT_EQ(reserved(), 40_MiB);
  free({small_part, rest, nearly});
}

TEST_P(allocator_size_contract, max_non_split_rounding_bounds_what_an_unsplit_block_wastes) {
  make("expandable_segments:False,max_split_size_mb:20,max_non_split_rounding_mb:30");
  void* const big = allocator->allocate(80_MiB);
  allocator->free(big);
  void* const other = allocator->allocate(40_MiB);
  EXPECT_EQ(reserved(), 120_MiB) << "40 MiB more than it asked for";
  void* const fits = allocator->allocate(60_MiB);
  EXPECT_EQ(fits, big);
  free({other, fits});
}

TEST_P(allocator_size_contract, split_limits_do_not_hit_expandable_blocks) {
  make("max_split_size_mb:20,max_non_split_rounding_mb:20");
  void* const big = allocator->allocate(80_MiB);
  allocator->free(big);
  const auto held = reserved();
  void* const small_part = allocator->allocate(12_MiB);
  void* const large_part = allocator->allocate(24_MiB);
  EXPECT_EQ(reserved(), held);
  EXPECT_EQ(block_bytes(large_part), 24_MiB);
  free({small_part, large_part});
}

TEST_P(allocator_size_contract, oversize_blocks_and_segments_are_counted) {
  make("expandable_segments:False,max_split_size_mb:24");
  EXPECT_EQ(allocator->statistics().max_split_size, 24_MiB);
  void* const one = allocator->allocate(24_MiB);
  void* const two = allocator->allocate(32_MiB);
  void* const below = allocator->allocate(22_MiB);
  allocator->free(one);
  auto now = allocator->statistics();
  EXPECT_EQ(now.oversize_allocations,
            (statistic{.current = 1, .peak = 2, .allocated = 2, .freed = 1}));
  EXPECT_EQ(now.oversize_segments,
            (statistic{.current = 2, .peak = 2, .allocated = 2, .freed = 0}));
  free({two, below});
  allocator->empty_cache();
  now = allocator->statistics();
  EXPECT_EQ(now.oversize_allocations.current, 0);
  EXPECT_EQ(now.oversize_segments.current, 0);
  EXPECT_EQ(now.oversize_segments.freed, 2);
}

TEST_P(allocator_size_contract, the_best_fit_is_the_lowest_of_the_smallest) {
  make();
  const auto all = allocate(6, 4_MiB);
  allocator->free(all[3]);
  allocator->free(all[1]);
  void* const filler = allocator->allocate(3_MiB);
  EXPECT_EQ(filler, std::min(all[1], all[3]));
  void* const exact = allocator->allocate(1_MiB + 512);
  EXPECT_EQ(exact, all[3]) << "1 MiB is left behind the first, too little";
  free({all[0], all[2], all[4], all[5], filler, exact});
}

TEST_P(allocator_size_contract, a_freed_block_joins_its_free_neighbours) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    void* const whole = allocator->allocate(18_MiB);
    allocator->free(whole);
    const auto held = reserved();
    const auto parts = allocate(3, 6_MiB);
    free({parts[0], parts[2], parts[1]});
    EXPECT_EQ(allocator->allocate(18_MiB), whole);
    EXPECT_EQ(reserved(), held) << config;
    allocator->free(whole);
    EXPECT_EQ(allocator->cache_info().largest_block, static_cast<std::size_t>(held));
  }
}

TEST_P(allocator_size_contract, size_limits_are_options) {
  auto options = parse_options(
      "expandable_segments:False,small_limit_kb:256,min_large_size_mb:4,"
      "small_segment_size_mb:4,large_segment_size_mb:12");
  make(options);
  void* const small = allocator->allocate(256_KiB);
  EXPECT_EQ(reserved(), 4_MiB);
  void* const large = allocator->allocate(257_KiB);
  EXPECT_EQ(reserved(), 16_MiB);
  void* const own = allocator->allocate(13_MiB);
  EXPECT_EQ(reserved(), 32_MiB);
  free({small, large, own});
}

}  // namespace evmm::test
