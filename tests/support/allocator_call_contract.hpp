// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <sstream>
#include <thread>

// Single calls: addresses asked for and told, what is given back, settings, peers, mistakes.

namespace evmm::test {

class allocator_call_contract : public allocator_contract {
 protected:
  static std::string text(const void* pointer) {
    std::ostringstream out;
    out << pointer;
    return out.str();
  }
};

TEST_P(allocator_call_contract, allocate_at_takes_a_part_of_a_free_block) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    auto* const block = static_cast<std::byte*>(allocator->allocate(12_MiB));
    allocator->free(block);
    const auto held = reserved();
    void* const middle = allocator->allocate_at(block + 4_MiB, 3_MiB);
    EXPECT_EQ(middle, block + 4_MiB) << config;
    EXPECT_EQ(allocator->allocate_at(block + 4_MiB, 3_MiB), nullptr) << "taken";
    EXPECT_EQ(allocator->allocate_at(block + 2_MiB, 3_MiB), nullptr) << "taken in part";
    void* const before = allocator->allocate_at(block, 4_MiB);
    EXPECT_EQ(before, block);
    EXPECT_EQ(allocator->allocate_at(block + 7_MiB, 6_MiB), nullptr) << "beyond the memory";
    EXPECT_EQ(reserved(), held);
    free({middle, before});
    EXPECT_EQ(allocator->cache_info().largest_block, static_cast<std::size_t>(held));
  }
}

TEST_P(allocator_call_contract, allocate_at_refuses_what_is_not_the_requests_memory) {
  make();
  const native_stream other = new_stream();
  auto* const block = static_cast<std::byte*>(allocator->allocate(12_MiB));
  EXPECT_EQ(allocator->allocate_at(block, 4_MiB), nullptr) << "live";
  allocator->free(block);
  EXPECT_EQ(allocator->allocate_at(block, 4_MiB, other), nullptr) << "another stream's";
  EXPECT_EQ(allocator->allocate_at(block, 512), nullptr) << "large memory";
  EXPECT_EQ(allocator->allocate_at(block + 256, 4_MiB), nullptr) << "not a multiple of 512";
  EXPECT_EQ(allocator->allocate_at(block, 0), nullptr);
  EXPECT_EQ(allocator->allocate_at(nullptr, 512), nullptr);
  EXPECT_EQ(allocator->allocate_at(block + 1_GiB, 4_MiB), nullptr) << "never makes memory";
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  EXPECT_EQ(allocator->allocate_at(block, 4_MiB), nullptr) << "another pool's";
  allocator->end_allocate_to_pool(pool);
  EXPECT_TRUE(
      says(refusal([&] { (void)allocator->allocate_at(block, std::size_t{1} << 60); }), "1 EiB"));
  EXPECT_EQ(allocator->statistics().allocation.all.allocated, 1);
}

TEST_P(allocator_call_contract, base_allocation_tells_the_place_in_its_run) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    void* const first = allocator->allocate(4_MiB);
    void* const second = allocator->allocate(4_MiB - 1);
    const allocation_place place = allocator->base_allocation(second);
    EXPECT_EQ(place.base, first);
    EXPECT_EQ(place.offset, 4_MiB);
    EXPECT_EQ(place.block_bytes, 4_MiB);
    EXPECT_EQ(place.bytes, static_cast<std::size_t>(reserved()));
    EXPECT_EQ(allocator->base_allocation(first).offset, 0u);
    free({first, second});
    EXPECT_TRUE(says(refusal([&] { (void)allocator->base_allocation(second); }), text(second)));
  }
}

TEST_P(allocator_call_contract, wrong_frees_name_the_address_and_change_nothing) {
  make();
  auto* const block = static_cast<std::byte*>(allocator->allocate(4_MiB));
  int foreign = 0;
  for (void* const wrong : std::vector<void*>{&foreign, block + 512, block + 1, block + 64_MiB}) {
    const std::string said = refusal([&] { allocator->free(wrong); });
    EXPECT_TRUE(says(said, "invalid_argument") && says(said, text(wrong))) << said;
    EXPECT_FALSE(allocator->owns(wrong));
  }
  EXPECT_TRUE(allocator->owns(block));
  allocator->free(block);
  EXPECT_FALSE(allocator->owns(block));
  EXPECT_TRUE(says(refusal([&] { allocator->free(block); }), text(block))) << "doubled";
  allocator->empty_cache();
  EXPECT_TRUE(says(refusal([&] { allocator->free(block); }), text(block))) << "given back";
  EXPECT_EQ(allocator->statistics().allocation.all.freed, 1);
}

TEST_P(allocator_call_contract, a_block_that_waits_for_streams_cannot_be_freed_again) {
  make();
  const native_stream other = new_stream();
  void* const block = allocator->allocate(4_MiB);
  const stream_gate gate(*on, other);
  allocator->record_stream(block, other);
  allocator->free(block);
  EXPECT_TRUE(says(refusal([&] { allocator->free(block); }), text(block)));
}

TEST_P(allocator_call_contract, stale_pointers_are_found_out_while_their_memory_goes) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    std::atomic<bool> over = false;
    std::atomic<void*> stale = nullptr;
    std::thread other([&] {
      while (!over) {
        void* const seen = stale;
        (void)allocator->owns(seen);
        allocator->record_stream(seen, nullptr);
      }
    });
    for (int i = 0; i < 50; ++i) {
      const pool_id pool = allocator->create_pool();
      allocator->begin_allocate_to_pool(pool);
      void* const block = allocator->allocate(3_MiB);
      allocator->end_allocate_to_pool(pool);
      stale = block;
      allocator->free(block);
      if (i % 2 == 0) allocator->empty_cache();
      allocator->release_pool(pool);
      EXPECT_FALSE(allocator->owns(block));
    }
    over = true;
    other.join();
  }
}

TEST_P(allocator_call_contract, cache_info_tells_what_is_free_and_held) {
  make(k_segments);
  EXPECT_EQ(allocator->cache_info().cached_bytes, 0u);
  void* const block = allocator->allocate(4_MiB);
  void* const big = allocator->allocate(24_MiB);
  EXPECT_EQ(allocator->cache_info().cached_bytes, 16_MiB);
  EXPECT_EQ(allocator->cache_info().largest_block, 16_MiB);
  allocator->free(big);
  EXPECT_EQ(allocator->cache_info().cached_bytes, 40_MiB);
  EXPECT_EQ(allocator->cache_info().largest_block, 24_MiB);
  allocator->free(block);
}

TEST_P(allocator_call_contract, empty_cache_gives_back_all_that_is_free) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    void* const kept = allocator->allocate(24_MiB);
    write(kept, 24_MiB, 3);
    free(allocate(3, 24_MiB, new_stream()));
    free({allocator->allocate(512, new_stream())});
    const auto held = static_cast<std::size_t>(reserved());
    const std::size_t given = allocator->empty_cache();
    EXPECT_EQ(given, held - 24_MiB) << config;
    EXPECT_EQ(allocator->empty_cache(), 0u);
    EXPECT_EQ(on->alive().mapped_bytes, 24_MiB);
    EXPECT_TRUE(holds(kept, 24_MiB, 3));
    allocator->free(kept);
  }
}

TEST_P(allocator_call_contract, empty_cache_waits_for_blocks_that_other_streams_use) {
  make(k_segments);
  const native_stream other = new_stream();
  void* const block = allocator->allocate(24_MiB);
  on->fill(at(block), std::byte{1}, 24_MiB, other);
  allocator->record_stream(block, other);
  allocator->free(block);
  EXPECT_EQ(allocator->empty_cache(), 24_MiB);
}

TEST_P(allocator_call_contract, empty_cache_of_a_pool_waits_for_no_stream_of_others) {
  make();
  const native_stream other = new_stream();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const inside = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(pool);
  void* const outside = allocator->allocate(3_MiB);
  allocator->record_stream(outside, other);
  free({inside, outside});
  on->clear_record();
  EXPECT_GE(allocator->empty_cache(pool), 2_MiB);
  for (const driver_call each : on->record_of_calls()) {
    EXPECT_NE(each, driver_call::synchronize_event);
  }
}

TEST_P(allocator_call_contract, copy_moves_bytes_in_stream_order) {
  make();
  const native_stream stream = new_stream();
  void* const from = allocator->allocate(3_MiB, stream);
  void* const to = allocator->allocate(3_MiB, stream);
  write(from, 3_MiB, 12);
  allocator->copy(to, from, 3_MiB, stream);
  allocator->copy(to, from, 0, stream);
  std::vector<std::byte> ordinary(3_MiB), expected(3_MiB);
  allocator->copy(ordinary.data(), to, 3_MiB, stream);
  on->copy(at(expected.data()), at(from), 3_MiB, stream);
  on->synchronize(stream);
  EXPECT_EQ(ordinary, expected);
  free({from, to});
}

TEST_P(allocator_call_contract, options_change_while_running) {
  make();
  allocator->configure("max_split_size_mb:64, garbage_collection_threshold:0.7");
  const allocator_options now = allocator->options();
  EXPECT_EQ(now.max_split_size, 64_MiB);
  EXPECT_EQ(now.garbage_collection_threshold, 0.7);
  EXPECT_TRUE(now.expandable_segments) << "what is not named stays";
  allocator->configure("roundup_power2_divisions:2");
  void* const block = allocator->allocate(5_MiB);
  EXPECT_EQ(block_bytes(block), 6_MiB);
  allocator->configure("roundup_power2_divisions:1");
  EXPECT_EQ(block_bytes(block), 6_MiB) << "what lives stays as it is";
  allocator->free(block);
  EXPECT_EQ(allocator->options().max_split_size, 64_MiB);
}

TEST_P(allocator_call_contract, bad_options_change_nothing) {
  make();
  const allocator_options before = allocator->options();
  for (const char* const wrong :
       {"max_split_size_mb", "max_split_size_mb:abc", "max_split_size_mb:1", "no_such_key:1",
        "expandable_segments:true", "expandable_segments:True,", "expandable_segments=True",
        "garbage_collection_threshold:1.5", "roundup_power2_divisions:3",
        "max_split_size_mb:64,max_split_size_mb:65", "per_process_memory_fraction:2",
        "backend:cudaMallocAsync", "min_block_size:1024", "small_limit_kb:512",
        "host_placement:[bind,0]", "share:none"}) {
    EXPECT_TRUE(says(refusal([&] { allocator->configure(wrong); }), "invalid_argument")) << wrong;
    EXPECT_EQ(allocator->options(), before) << wrong;
  }
  free({allocator->allocate(3_MiB)});
}

TEST_P(allocator_call_contract, another_device_reaches_all_memory_when_enabled) {
  if (on->device_count() < 2) GTEST_SKIP() << "one device";
  if (!on->can_access(device_id{1}, device_id{0})) GTEST_SKIP() << "no peer access";
  for (const char* const config : {"", k_segments}) {
    make(config);
    const device_id peer{1};
    void* const existing = allocator->allocate(3_MiB);
    allocator->enable_peer(peer);
    allocator->enable_peer(peer);
    allocator->enable_peer(device_id{0});
    void* const future = allocator->allocate(24_MiB);
    write_pattern(*on, at(existing), 3_MiB, 1, peer);
    write_pattern(*on, at(future), 24_MiB, 2, peer);
    EXPECT_TRUE(holds(existing, 3_MiB, 1));
    EXPECT_TRUE(holds(future, 24_MiB, 2));
    const auto parts = allocate(4, 8_MiB);
    free({parts[0], parts[2], future});
    void* const moved = allocator->allocate(40_MiB);
    write_pattern(*on, at(moved), 40_MiB, 3, peer);
    EXPECT_TRUE(holds(moved, 40_MiB, 3)) << "handles that moved, too";
    free({existing, parts[1], parts[3], moved});
  }
}

TEST_P(allocator_call_contract, peers_may_be_given_from_the_start) {
  if (on->device_count() < 2) GTEST_SKIP() << "one device";
  if (!on->can_access(device_id{1}, device_id{0})) GTEST_SKIP() << "no peer access";
  make("peers:[1]");
  void* const block = allocator->allocate(3_MiB);
  write_pattern(*on, at(block), 3_MiB, 1, device_id{1});
  EXPECT_TRUE(holds(block, 3_MiB, 1));
  allocator->free(block);
}

TEST_P(allocator_call_contract, peers_may_be_named_while_running) {
  if (on->device_count() < 2) GTEST_SKIP() << "one device";
  if (!on->can_access(device_id{1}, device_id{0})) GTEST_SKIP() << "no peer access";
  make();
  void* const block = allocator->allocate(3_MiB);
  allocator->configure("peers:[1]");
  write_pattern(*on, at(block), 3_MiB, 1, device_id{1});
  EXPECT_TRUE(holds(block, 3_MiB, 1));
  EXPECT_TRUE(says(refusal([&] { allocator->configure("peers:[]"); }), "invalid_argument"));
  EXPECT_EQ(allocator->options().peers, std::vector<device_id>{device_id{1}});
  allocator->free(block);
}

TEST_P(allocator_call_contract, a_device_that_is_not_there_is_refused) {
  make();
  void* const block = allocator->allocate(3_MiB);
  EXPECT_THROW(allocator->enable_peer(device_id{99}), error);
  free({block, allocator->allocate(30_MiB)});
  EXPECT_THROW(caching_allocator(on, device_id{99}), error);
  EXPECT_THROW(caching_allocator(nullptr, device_id{0}), invalid_argument);
}

TEST_P(allocator_call_contract, its_device_and_driver_are_told) {
  make();
  EXPECT_EQ(allocator->device().value, 0);
  EXPECT_EQ(&allocator->on(), on.get());
}

TEST_P(allocator_call_contract, live_allocations_die_with_it_with_one_warning) {
  make();
  (void)allocate(2, 3_MiB);
  ::testing::internal::CaptureStderr();
  allocator.reset();
  const std::string said = ::testing::internal::GetCapturedStderr();
  EXPECT_TRUE(says(said, "2 live allocations")) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1);
}

}  // namespace evmm::test
