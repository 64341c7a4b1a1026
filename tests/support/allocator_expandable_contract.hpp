// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

#include <algorithm>

// Expandable segments: memory that no live block touches goes where it is needed.

namespace evmm::test {

class allocator_expandable_contract : public allocator_contract {
 protected:
  /// Blocks of 16 MiB of a stream, of which every second is freed: 2 of 4 stay.
  std::vector<void*> pinned_halves(native_stream stream = nullptr) {
    const auto all = allocate(4, 16_MiB, stream);
    free({all[0], all[2]});
    return {all[1], all[3]};
  }
  std::int64_t made() const { return allocator->statistics().num_device_alloc; }
  std::int64_t moved() const {
    const auto now = allocator->statistics();
    return now.handles_recycled + now.handles_claimed;
  }
};

TEST_P(allocator_expandable_contract, is_the_default) {
  make();
  void* const block = allocator->allocate(3_MiB);
  const auto sizes = allocator->expandable_sizes();
  ASSERT_EQ(sizes.size(), 1u);
  EXPECT_TRUE(sizes[0].large);
  EXPECT_EQ(sizes[0].mapped_bytes, 4_MiB);
  EXPECT_GE(sizes[0].reserved_bytes, on->usage(memory_location::on(device_id{0})).total_bytes);
  EXPECT_EQ(allocator->statistics().mapped_bytes, 4 << 20);
  allocator->free(block);
}

TEST_P(allocator_expandable_contract, many_small_blocks_make_room_for_few_large_ones) {
  make();
  free(allocate(8, 16_MiB));
  const auto held = reserved();
  const auto calls = made();
  free(allocate(4, 32_MiB));
  EXPECT_EQ(reserved(), held);
  EXPECT_EQ(made(), calls);
  EXPECT_EQ(held, 128 << 20) << "and nothing is held that was never asked for";
}

TEST_P(allocator_expandable_contract, few_large_blocks_make_room_for_many_small_ones) {
  make();
  free(allocate(4, 32_MiB));
  const auto calls = made();
  free(allocate(8, 16_MiB));
  EXPECT_EQ(reserved(), 128 << 20);
  EXPECT_EQ(made(), calls);
}

TEST_P(allocator_expandable_contract, handles_move_out_from_between_live_blocks) {
  make();
  const auto live = pinned_halves();
  const auto held = reserved();
  const auto calls = made();
  void* const large = allocator->allocate(32_MiB);
  EXPECT_EQ(reserved(), held);
  EXPECT_EQ(made(), calls);
  EXPECT_GT(moved(), 0);
  EXPECT_EQ(allocator->statistics().mapped_bytes, held);
  free({live[0], live[1], large});
}

TEST_P(allocator_expandable_contract, without_recycling_memory_is_made) {
  make("recycle_handles:never");
  const auto live = pinned_halves();
  void* const large = allocator->allocate(32_MiB);
  EXPECT_GE(reserved(), 80 << 20);
  EXPECT_EQ(moved(), 0);
  free({live[0], live[1], large});
}

TEST_P(allocator_expandable_contract, within_the_slack_memory_is_made) {
  make("recycle_slack:0.5");
  const auto live = pinned_halves();
  void* const large = allocator->allocate(32_MiB);
  EXPECT_EQ(reserved(), 96 << 20) << "half more than the 64 MiB that were live at one time";
  EXPECT_EQ(moved(), 0);
  free({live[0], live[1], large});
}

TEST_P(allocator_expandable_contract, a_program_that_repeats_itself_stops_moving_handles) {
  make();
  std::int64_t before = 0;
  for (int round = 0; round < 6; ++round) {
    before = allocator->statistics().handles_recycled;
    const auto live = pinned_halves();
    void* const large = allocator->allocate(32_MiB);
    free({live[0], live[1], large});
  }
  EXPECT_EQ(allocator->statistics().handles_recycled, before) << "the last round mapped nothing";
  EXPECT_EQ(reserved(), 64 << 20);
}

TEST_P(allocator_expandable_contract, live_contents_survive_every_move_around_them) {
  make();
  for (std::uint64_t round = 0; round < 3; ++round) {
    const auto all = allocate(6, 6_MiB + 512);
    for (std::size_t i = 0; i < all.size(); ++i) write(all[i], 6_MiB + 512, 10 * round + i);
    free({all[0], all[2], all[4]});
    void* const large = allocator->allocate(14_MiB);
    write(large, 14_MiB, 99);
    const auto more = allocate(2, 3_MiB);
    for (void* each : more) write(each, 3_MiB, 77);
    for (const std::size_t i : {1, 3, 5}) {
      EXPECT_TRUE(holds(all[i], 6_MiB + 512, 10 * round + i)) << round << " " << i;
    }
    EXPECT_TRUE(holds(large, 14_MiB, 99));
    free({all[1], all[3], all[5], large, more[0], more[1]});
  }
  EXPECT_GT(moved(), 0);
}

TEST_P(allocator_expandable_contract, handles_of_an_idle_stream_serve_another) {
  make();
  const native_stream other = new_stream();
  free(allocate(2, 16_MiB, other));
  void* const here = allocator->allocate(32_MiB);
  EXPECT_EQ(reserved(), 32 << 20);
  EXPECT_EQ(made(), 16);
  allocator->free(here);
}

TEST_P(allocator_expandable_contract, handles_of_a_busy_stream_stay_until_it_is_idle) {
  make();
  const native_stream busy = new_stream();
  const native_stream needy = new_stream();
  free(allocate(2, 8_MiB, busy));
  {
    stream_gate gate(*on, busy);
    void* const fresh = allocator->allocate(16_MiB, needy);
    EXPECT_EQ(reserved(), 32 << 20) << "its memory may be in use";
    EXPECT_EQ(moved(), 0);
    allocator->free(fresh);
  }
  on->synchronize(busy);
  void* const all = allocator->allocate(32_MiB, needy);
  EXPECT_EQ(reserved(), 32 << 20);
  allocator->free(all);
}

TEST_P(allocator_expandable_contract, handles_of_a_busy_stream_are_taken_behind_a_wait_when_asked) {
  make("recycle_handles:wait");
  const native_stream busy = new_stream();
  const native_stream needy = new_stream();
  void* const first = allocator->allocate(8_MiB, busy);
  allocator->free(first);
  void* taken = nullptr;
  {
    stream_gate gate(*on, busy);
    on->fill(at(first), std::byte{1}, 8_MiB, busy);
    taken = allocator->allocate(8_MiB, needy);
    EXPECT_EQ(reserved(), 8 << 20);
    on->fill(at(taken), std::byte{2}, 8_MiB, needy);
    EXPECT_FALSE(on->idle(needy)) << "it waits for the stream that had the memory";
  }
  on->synchronize(needy);
  std::vector<std::byte> found(8_MiB);
  on->copy(at(found.data()), at(taken), 8_MiB, needy);
  on->synchronize(needy);
  EXPECT_EQ(std::count(found.begin(), found.end(), std::byte{2}), 8 << 20);
  allocator->free(taken);
}

TEST_P(allocator_expandable_contract,
       addresses_of_moved_memory_are_left_alone_while_work_uses_them) {
  make();
  const native_stream stream = new_stream();
  const auto all = allocate(4, 16_MiB, stream);
  const stream_gate gate(*on, stream);  // to wait for the stream would be for ever
  on->fill(at(all[0]), std::byte{1}, 16_MiB, stream);
  free({all[0], all[2]});
  void* const large = allocator->allocate(32_MiB, stream);
  EXPECT_EQ(reserved(), 64 << 20);
  void* const more = allocator->allocate(16_MiB, stream);
  EXPECT_EQ(reserved(), 80 << 20);
  free({all[1], all[3], large, more});
}

TEST_P(allocator_expandable_contract, a_stream_whose_memory_was_taken_goes_on_elsewhere) {
  make("recycle_handles:wait");
  const native_stream busy = new_stream();
  void* const first = allocator->allocate(8_MiB, busy);
  const stream_gate gate(*on, busy);
  on->fill(at(first), std::byte{1}, 8_MiB, busy);
  allocator->free(first);
  void* const taken = allocator->allocate(8_MiB, new_stream());
  EXPECT_EQ(reserved(), 8 << 20);
  void* const next = allocator->allocate(8_MiB, busy);
  EXPECT_NE(next, first) << "work still uses what is mapped there";
  free({taken, next});
}

TEST_P(allocator_expandable_contract, handles_move_between_size_classes_and_pools) {
  make();
  free(allocate(8, 1_MiB));
  void* const large = allocator->allocate(8_MiB);
  EXPECT_EQ(reserved(), 8 << 20);
  EXPECT_EQ(allocator->statistics().reserved_bytes.small_pool.current, 0);
  EXPECT_EQ(allocator->statistics().reserved_bytes.large_pool.current, 8 << 20);
  allocator->free(large);
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const inside = allocator->allocate(8_MiB);
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(reserved(), 8 << 20);
  allocator->free(inside);
  void* const outside = allocator->allocate(8_MiB);
  EXPECT_EQ(reserved(), 8 << 20) << "and back";
  allocator->free(outside);
  EXPECT_EQ(made(), 4);
}

TEST_P(allocator_expandable_contract, handles_of_a_captured_pool_stay) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  allocator->begin_capture(pool);
  free(allocate(2, 8_MiB));
  allocator->end_capture(pool);
  allocator->end_allocate_to_pool(pool);
  void* const outside = allocator->allocate(8_MiB);
  EXPECT_EQ(allocator->statistics(pool).reserved_bytes.all.current, 16 << 20)
      << "a graph may replay on them";
  EXPECT_EQ(moved(), 0);
  allocator->release_pool(pool);
  void* const more = allocator->allocate(16_MiB);
  EXPECT_LE(reserved(), 24 << 20) << "no graph is left";
  free({outside, more});
}

TEST_P(allocator_expandable_contract, memory_of_the_host_tier_stays_in_its_tier) {
  make();
  const pool_id pool = allocator->create_pool({.tiers = {tier::host}});
  allocator->begin_allocate_to_pool(pool);
  void* const host = allocator->allocate(8_MiB);
  allocator->end_allocate_to_pool(pool);
  write(host, 8_MiB, 3);
  allocator->free(host);
  EXPECT_EQ(allocator->report().host_tier_bytes, 8_MiB);
  EXPECT_EQ(allocator->report().reserved_bytes, 0u);
  void* const on_device = allocator->allocate(8_MiB);
  EXPECT_EQ(allocator->report().reserved_bytes, 8_MiB);
  EXPECT_EQ(allocator->report().host_tier_bytes, 8_MiB);
  allocator->free(on_device);
}

TEST_P(allocator_expandable_contract, the_reservation_is_an_option_and_by_class) {
  make("expandable_segments_reserve:256M,expandable_segments_reserve_by_class:[kv:512M]");
  const native_stream cache = new_stream();
  allocator->set_stream_class(cache, "kv");
  free({allocator->allocate(2_MiB), allocator->allocate(2_MiB, cache)});
  for (const expandable_size& each : allocator->expandable_sizes()) {
    EXPECT_EQ(each.reserved_bytes, each.stream == cache ? 512_MiB : 256_MiB);
  }
  EXPECT_EQ(allocator->expandable_sizes().size(), 2u);
}

TEST_P(allocator_expandable_contract, a_request_beyond_the_reservation_names_the_key) {
  make("expandable_segments_reserve:64M");
  std::size_t told = 0;
  const auto observer = allocator->on_out_of_memory([&](const oom_report& report) {
    told = report.requested_bytes;
    (void)allocator->statistics();
  });
  const std::string said = refusal([&] { (void)allocator->allocate(65_MiB); });
  EXPECT_TRUE(says(said, "out_of_memory")) << said;
  EXPECT_TRUE(says(said, "expandable_segments_reserve")) << said;
  EXPECT_TRUE(says(said, "64.0 MiB")) << said;
  EXPECT_EQ(told, 65_MiB);
  EXPECT_EQ(allocator->statistics().num_ooms, 1);
  const auto all = allocate(2, 40_MiB);
  EXPECT_EQ(allocator->expandable_sizes().size(), 2u) << "a second range where the first is full";
  free(all);
}

TEST_P(allocator_expandable_contract, a_reservation_beyond_all_addresses_names_the_key) {
  make("expandable_segments_reserve:400000G");
  try {
    (void)allocator->allocate(2_MiB);
    ADD_FAILURE() << "nothing has so many addresses";
  } catch (const driver_error& refused) {
    EXPECT_TRUE(says(refused.message(), "cannot reserve 390.6 TiB")) << refused.what();
    EXPECT_TRUE(says(refused.help(), "expandable_segments_reserve")) << refused.what();
  }
}

TEST_P(allocator_expandable_contract, a_request_beyond_the_reservation_lies_in_the_next_tier) {
  make("expandable_segments_reserve:16M");
  const pool_id pool = allocator->create_pool({.tiers = {tier::device, tier::host}});
  allocator->begin_allocate_to_pool(pool);
  void* const block = allocator->allocate(24_MiB);
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(allocator->report().host_tier_bytes, 24_MiB);
  EXPECT_EQ(allocator->statistics().num_ooms, 0);
  allocator->free(block);
}

TEST_P(allocator_expandable_contract, sizes_of_handles_are_rounded_up_to_the_granularity) {
  for (const char* const config :
       {"min_handle_size_mb:512K", "min_handle_size_mb:3,max_handle_size_mb:3",
        "min_handle_size_mb:3,max_handle_size_mb:12", "min_handle_size_mb:1,max_handle_size_mb:1",
        "min_handle_size_mb:2560K,max_handle_size_mb:5"}) {
    make(config);
    auto all = allocate(8, 5_MiB);
    free({all[0], all[3], all[6]});
    all[0] = allocator->allocate(12_MiB);
    all[3] = all[6] = nullptr;
    EXPECT_NO_THROW(allocator->check_invariants()) << config;
    free(all);
  }
}

TEST_P(allocator_expandable_contract, the_key_can_change_while_running) {
  make(k_segments);
  void* const fixed = allocator->allocate(12_MiB);
  EXPECT_TRUE(allocator->expandable_sizes().empty());
  allocator->configure("expandable_segments:True");
  void* const expandable = allocator->allocate(12_MiB);
  EXPECT_EQ(allocator->expandable_sizes().size(), 1u);
  free({fixed, expandable});
  allocator->empty_cache();
  EXPECT_EQ(reserved(), 0);
}

TEST_P(allocator_expandable_contract, free_parts_are_given_back_around_live_blocks) {
  make();
  const auto all = allocate(3, 5_MiB);
  write(all[1], 5_MiB, 5);
  free({all[0], all[2]});
  EXPECT_EQ(allocator->empty_cache(), 10_MiB) << "all handles but those that the block touches";
  EXPECT_EQ(reserved(), 6 << 20);
  EXPECT_TRUE(holds(all[1], 5_MiB, 5));
  void* const again = allocator->allocate(5_MiB);
  write(again, 5_MiB, 6);
  EXPECT_TRUE(holds(all[1], 5_MiB, 5));
  free({all[1], again});
}

}  // namespace evmm::test
