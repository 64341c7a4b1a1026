// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

#include <thread>

// What the allocator counts, with PyTorch's meanings.

namespace evmm::test {

class allocator_statistics_contract : public allocator_contract {
 protected:
  static statistic counted(std::int64_t current, std::int64_t peak, std::int64_t allocated,
                           std::int64_t freed) {
    return {.current = current, .peak = peak, .allocated = allocated, .freed = freed};
  }
  static void expect_none(const pool_statistic& of) {
    EXPECT_EQ(of.all, statistic{});
    EXPECT_EQ(of.small_pool, statistic{});
    EXPECT_EQ(of.large_pool, statistic{});
  }
};

TEST_P(allocator_statistics_contract, all_is_zero_at_first) {
  make();
  const auto now = allocator->statistics();
  for (const auto* each : {&now.allocation, &now.active, &now.segment, &now.inactive_split,
                           &now.allocated_bytes, &now.reserved_bytes, &now.requested_bytes}) {
    expect_none(*each);
  }
  EXPECT_EQ(now.max_split_size, -1) << "no limit";
  EXPECT_EQ(now.num_device_alloc + now.num_ooms + now.num_alloc_retries, 0);
}

TEST_P(allocator_statistics_contract, a_script_is_counted_exactly) {
  make(k_segments);
  void* const a = allocator->allocate(1000);        // 1,024 B small
  void* const b = allocator->allocate(512_KiB);     // small
  void* const c = allocator->allocate(14_MiB - 1);  // 14 MiB large
  allocator->free(b);
  void* const d = allocator->allocate(2_MiB);  // large, in a segment of 20 MiB
  allocator->free(a);
  allocator->free(c);
  const auto now = allocator->statistics();
  const auto mib = [](std::int64_t n) { return n << 20; };
  EXPECT_EQ(now.allocation.all, counted(1, 3, 4, 3));
  EXPECT_EQ(now.allocation.small_pool, counted(0, 2, 2, 2));
  EXPECT_EQ(now.allocation.large_pool, counted(1, 2, 2, 1));
  EXPECT_EQ(now.active.all, counted(1, 3, 4, 3));
  EXPECT_EQ(now.allocated_bytes.small_pool,
            counted(0, 1024 + 524288, 1024 + 524288, 1024 + 524288));
  EXPECT_EQ(now.allocated_bytes.large_pool, counted(mib(2), mib(16), mib(16), mib(14)));
  EXPECT_EQ(now.allocated_bytes.all,
            counted(mib(2), mib(16) + 1024, mib(16) + 1024 + 524288, mib(14) + 1024 + 524288));
  EXPECT_EQ(now.requested_bytes.large_pool, counted(mib(2), mib(16) - 1, mib(16) - 1, mib(14) - 1));
  EXPECT_EQ(now.requested_bytes.small_pool.allocated, 1000 + 524288);
  EXPECT_EQ(now.segment.all, counted(3, 3, 3, 0));
  EXPECT_EQ(now.segment.small_pool.current, 1);
  EXPECT_EQ(now.reserved_bytes.all, counted(mib(36), mib(36), mib(36), 0));
  EXPECT_EQ(now.reserved_bytes.small_pool.current, mib(2));
  EXPECT_EQ(now.num_device_alloc, 3);
  EXPECT_EQ(now.num_device_free, 0);
  allocator->free(d);
}

TEST_P(allocator_statistics_contract, given_back_memory_is_counted) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    free(allocate(2, 20_MiB));
    const auto before = allocator->statistics();
    EXPECT_EQ(allocator->empty_cache(),
              static_cast<std::size_t>(before.reserved_bytes.all.current));
    const auto after = allocator->statistics();
    EXPECT_EQ(after.reserved_bytes.all.current, 0);
    EXPECT_EQ(after.reserved_bytes.all.peak, before.reserved_bytes.all.peak);
    EXPECT_EQ(after.reserved_bytes.all.freed, before.reserved_bytes.all.allocated);
    EXPECT_EQ(after.segment.all.current, 0);
    EXPECT_EQ(after.num_device_free, after.num_device_alloc);
  }
}

TEST_P(allocator_statistics_contract, giving_memory_back_waits_for_everything_once) {
  make(k_segments);
  allow(20_MiB);
  free({allocator->allocate(20_MiB, new_stream())});
  EXPECT_EQ(allocator->statistics().num_sync_all_streams, 0);
  free({allocator->allocate(15_MiB)});
  EXPECT_EQ(allocator->statistics().num_sync_all_streams, 1) << "to give memory back";
  allocator->empty_cache();
  EXPECT_EQ(allocator->statistics().num_sync_all_streams, 2);
}

TEST_P(allocator_statistics_contract, resets_forget_peaks_or_totals_alone) {
  make(k_segments);
  const auto all = allocate(4, 4_MiB);
  free({all[0], all[1]});
  allocator->reset_peaks();
  auto now = allocator->statistics();
  EXPECT_EQ(now.allocation.all, counted(2, 2, 4, 2));
  EXPECT_EQ(now.allocated_bytes.large_pool.peak, 8 << 20);
  EXPECT_EQ(now.reserved_bytes.all.peak, now.reserved_bytes.all.current);
  allocator->reset_totals();
  now = allocator->statistics();
  EXPECT_EQ(now.allocation.all, counted(2, 2, 0, 0));
  EXPECT_EQ(now.reserved_bytes.all.allocated, 0);
  EXPECT_EQ(now.num_device_alloc, 0);
  free({all[2], all[3]});
  void* const one = allocator->allocate(4_MiB);
  now = allocator->statistics();
  EXPECT_EQ(now.allocation.all, counted(1, 2, 1, 2));
  EXPECT_EQ(now.requested_bytes.all, counted(4 << 20, 8 << 20, 4 << 20, 8 << 20));
  allocator->free(one);
}

TEST_P(allocator_statistics_contract, peaks_over_several_streams_in_sequence_are_exact) {
  make();
  std::int64_t live = 0, peak = 0, small_live = 0, small_peak = 0;
  const std::vector<native_stream> streams = {nullptr, new_stream(), new_stream(), new_stream()};
  std::vector<std::pair<void*, std::int64_t>> held;
  std::uint64_t random = 7;
  for (int i = 0; i < 400; ++i) {
    random = random * 6364136223846793005u + 1442695040888963407u;
    const auto pick = static_cast<std::size_t>(random >> 33);
    if (held.size() < 20 && pick % 3 != 0) {
      const std::size_t bytes = ((pick % 5) + 1) * (pick % 2 == 0 ? 512 : 1_MiB + 512);
      held.push_back({allocator->allocate(bytes, streams[pick % 4]), bytes});
      live += static_cast<std::int64_t>(bytes);
      if (bytes <= 1_MiB) small_live += static_cast<std::int64_t>(bytes);
    } else if (!held.empty()) {
      const auto which = held.begin() + static_cast<std::ptrdiff_t>(pick % held.size());
      allocator->free(which->first);
      live -= which->second;
      if (which->second <= 1 << 20) small_live -= which->second;
      held.erase(which);
    }
    peak = std::max(peak, live);
    small_peak = std::max(small_peak, small_live);
    if (i == 150) {
      allocator->reset_peaks();
      peak = live;
      small_peak = small_live;
    }
    const auto now = allocator->statistics();
    ASSERT_EQ(now.allocated_bytes.all.current, live) << i;
    ASSERT_EQ(now.allocated_bytes.all.peak, peak) << i;
    ASSERT_EQ(now.allocated_bytes.small_pool.peak, small_peak) << i;
  }
  for (const auto& [block, bytes] : held) allocator->free(block);
}

TEST_P(allocator_statistics_contract, blocks_that_wait_for_streams_are_active_not_allocated) {
  make();
  const native_stream other = new_stream();
  void* const block = allocator->allocate(4_MiB - 1);
  {
    stream_gate gate(*on, other);
    allocator->record_stream(block, other);
    allocator->free(block);
    const auto now = allocator->statistics();
    EXPECT_EQ(now.allocation.all, counted(0, 1, 1, 1));
    EXPECT_EQ(now.requested_bytes.all.current, 0);
    EXPECT_EQ(now.active.all, counted(1, 1, 1, 0));
    EXPECT_EQ(now.active_bytes.all.current, 4 << 20);
  }
  allocator->empty_cache();
  EXPECT_EQ(allocator->statistics().active.all, counted(0, 1, 1, 1));
}

TEST_P(allocator_statistics_contract, inactive_splits_are_free_parts_of_segments) {
  make(k_segments);
  void* const a = allocator->allocate(5_MiB);
  auto now = allocator->statistics();
  EXPECT_EQ(now.inactive_split.all.current, 1);
  EXPECT_EQ(now.inactive_split_bytes.large_pool.current, 15 << 20);
  void* const b = allocator->allocate(5_MiB);
  void* const c = allocator->allocate(512);
  allocator->free(a);
  now = allocator->statistics();
  EXPECT_EQ(now.inactive_split.large_pool.current, 2) << "before b and behind it";
  EXPECT_EQ(now.inactive_split.small_pool.current, 1);
  EXPECT_EQ(now.inactive_split_bytes.small_pool.current, (2 << 20) - 512);
  free({b, c});
  now = allocator->statistics();
  EXPECT_EQ(now.inactive_split.all, counted(0, 3, 3, 3)) << "whole segments are no parts";
  EXPECT_EQ(now.inactive_split_bytes.large_pool, counted(0, 15 << 20, 15 << 20, 15 << 20));
  allocator->reset_peaks();
  allocator->reset_totals();
  expect_none(allocator->statistics().inactive_split);
  expect_none(allocator->statistics().inactive_split_bytes);
}

TEST_P(allocator_statistics_contract, a_pool_has_statistics_of_its_own) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const inside = allocator->allocate(3_MiB - 1);
  allocator->end_allocate_to_pool(pool);
  void* const outside = allocator->allocate(8_MiB);
  const auto now = allocator->statistics(pool);
  EXPECT_EQ(now.allocation.all.current, 1);
  EXPECT_EQ(now.allocated_bytes.all.current, 3 << 20);
  EXPECT_EQ(now.requested_bytes.large_pool.current, (3 << 20) - 1);
  EXPECT_GE(now.reserved_bytes.all.current, 3 << 20);
  EXPECT_LT(now.reserved_bytes.all.current, 8 << 20);
  EXPECT_EQ(allocator->statistics().allocation.all.current, 2);
  EXPECT_TRUE(says(refusal([&] { (void)allocator->statistics(pool_id{77}); }), "pool 77"));
  free({inside, outside});
}

TEST_P(allocator_statistics_contract, private_pools_tell_what_they_reserve) {
  make(k_segments);
  const pool_id pool = allocator->create_pool();
  const auto by_pool = [&] { return allocator->statistics().reserved_bytes_by_private_pools; };
  EXPECT_EQ(by_pool().size(), 1u) << "the default pool is not private";
  expect_none(by_pool().at(pool));
  allocator->begin_allocate_to_pool(pool);
  void* const inside = allocator->allocate(8_MiB);
  void* const small = allocator->allocate(512);
  allocator->end_allocate_to_pool(pool);
  void* const outside = allocator->allocate(40_MiB);
  const auto mib = [](std::int64_t n) { return n << 20; };
  EXPECT_EQ(by_pool().at(pool).all, counted(mib(22), mib(22), mib(22), 0));
  EXPECT_EQ(by_pool().at(pool).large_pool, counted(mib(20), mib(20), mib(20), 0));
  free({inside, small});
  allocator->empty_cache(pool);
  EXPECT_EQ(by_pool().at(pool).all, counted(0, mib(22), mib(22), mib(22)));
  EXPECT_EQ(by_pool().at(pool).small_pool, counted(0, mib(2), mib(2), mib(2)));
  EXPECT_EQ(allocator->statistics(pool).reserved_bytes.all, by_pool().at(pool).all);
  allocator->reset_peaks();
  EXPECT_EQ(by_pool().at(pool).all, counted(0, 0, mib(22), mib(22)));
  allocator->reset_totals();
  EXPECT_EQ(by_pool().at(pool).all, counted(0, 0, 0, 0));
  allocator->release_pool(pool);
  EXPECT_TRUE(by_pool().empty());
  allocator->free(outside);
}

TEST_P(allocator_statistics_contract, handles_that_move_between_pools_are_counted_there) {
  make("max_handle_size_mb:4");
  const pool_id pool = allocator->create_pool();
  const auto of = [&](pool_id its) {
    return allocator->statistics(its).reserved_bytes.all.current;
  };
  allocator->begin_allocate_to_pool(pool);
  void* const first = allocator->allocate(32_MiB);
  void* const stays = allocator->allocate(4_MiB);
  allocator->free(first);
  allocator->end_allocate_to_pool(pool);
  const auto before = of(pool);
  EXPECT_EQ(before, reserved());
  void* const outside = allocator->allocate(24_MiB);
  EXPECT_LE(reserved(), 38 << 20) << "memory has moved";
  EXPECT_GE(of(pool_id{}), 24 << 20);
  EXPECT_LT(of(pool), before);
  EXPECT_EQ(of(pool) + of(pool_id{}), reserved());
  free({outside, stays});
  allocator->empty_cache();
  EXPECT_EQ(of(pool), 0);
  EXPECT_EQ(of(pool_id{}), 0);
}

TEST_P(allocator_statistics_contract, waits_for_everything_are_counted) {
  make();
  const auto waits = [&] { return allocator->statistics().num_sync_all_streams; };
  free(allocate(2, 20_MiB));
  EXPECT_EQ(waits(), 0);
  allocator->empty_cache();
  EXPECT_EQ(waits(), 1);
  allow(8_MiB);
  EXPECT_THROW((void)allocator->allocate(64_MiB), out_of_memory);
  EXPECT_EQ(waits(), 2);
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 1);
}

TEST_P(allocator_statistics_contract, a_pool_counts_handles_as_segments_too) {
  make("max_handle_size_mb:4");
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const inside = allocator->allocate(30_MiB);
  allocator->end_allocate_to_pool(pool);
  const auto now = allocator->statistics(pool);
  EXPECT_GT(now.segment.all.current, 1);
  EXPECT_EQ(now.segment.all.current, allocator->statistics().segment.all.current);
  EXPECT_EQ(now.reserved_bytes.all.current, reserved());
  allocator->free(inside);
}

TEST_P(allocator_statistics_contract, oversize_is_what_it_was_when_it_was_made) {
  make(k_segments);
  void* const before = allocator->allocate(40_MiB);
  allocator->configure("max_split_size_mb:32");
  void* const after = allocator->allocate(40_MiB);
  EXPECT_EQ(allocator->statistics().oversize_allocations, counted(1, 1, 1, 0));
  EXPECT_EQ(allocator->statistics().oversize_segments, counted(1, 1, 1, 0));
  allocator->configure("max_split_size_mb:64");
  free({before, after});
  allocator->empty_cache();
  EXPECT_EQ(allocator->statistics().oversize_allocations, counted(0, 1, 1, 1));
  EXPECT_EQ(allocator->statistics().oversize_segments, counted(0, 1, 1, 1));
}

TEST_P(allocator_statistics_contract, oversize_segments_go_with_their_pool) {
  make("expandable_segments:False,max_split_size_mb:32");
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  allocator->free(allocator->allocate(40_MiB));
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(allocator->statistics().oversize_segments.current, 1);
  allocator->release_pool(pool);
  EXPECT_EQ(reserved(), 0);
  EXPECT_EQ(allocator->statistics().oversize_segments.current, 0);
}

TEST_P(allocator_statistics_contract, the_report_tells_what_others_hold) {
  make();
  void* const block = allocator->allocate(6_MiB - 1);
  const memory_report before = allocator->report();
  const auto usage = on->usage(memory_location::on(device_id{0}));
  EXPECT_EQ(before.total_bytes, usage.total_bytes);
  EXPECT_EQ(before.allocated_bytes, 6_MiB);
  EXPECT_EQ(before.requested_bytes, 6_MiB - 1);
  EXPECT_EQ(before.reserved_bytes, static_cast<std::size_t>(reserved()));
  EXPECT_EQ(before.host_tier_bytes, 0u);
  const auto foreign = on->create({.bytes = 64_MiB, .where = memory_location::on(device_id{0})});
  const memory_report after = allocator->report();
  EXPECT_EQ(after.outside_bytes - before.outside_bytes, 64_MiB);
  EXPECT_EQ(before.free_bytes - after.free_bytes, 64_MiB);
  EXPECT_TRUE(says(after.text(), "in use outside this allocator")) << after.text();
  on->release(foreign);
  allocator->free(block);
}

TEST_P(allocator_statistics_contract, threads_lose_no_count) {
  make();
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t) {
    threads.emplace_back([&, stream = t % 2 == 0 ? nullptr : new_stream()] {
      for (int i = 0; i < 500; ++i) {
        void* const block = allocator->allocate(512 * static_cast<std::size_t>(i % 9 + 1), stream);
        allocator->free(block);
      }
    });
  }
  for (auto& each : threads) each.join();
  const auto now = allocator->statistics();
  EXPECT_EQ(now.allocation.all.allocated, 2000);
  EXPECT_EQ(now.allocation.all.freed, 2000);
  EXPECT_LE(now.allocation.all.peak, 4);
  EXPECT_EQ(now.allocated_bytes.all.allocated, now.allocated_bytes.all.freed);
}

}  // namespace evmm::test
