// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_capture_contract.hpp"

#include <algorithm>

// Checkpoints of a pool, which graphs that share it are launched between.

namespace evmm::test {

class allocator_checkpoint_contract : public allocator_capture_contract {};

TEST_P(allocator_checkpoint_contract, restore_makes_live_what_was_live) {
  make();
  const native_stream stream = new_stream();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  const auto all = allocate(3, 3_MiB, stream);
  const auto then = allocator->checkpoint(pool);
  free({all[0], all[1]});
  void* const later = allocator->allocate(6_MiB, stream);
  void* const small = allocator->allocate(512, stream);
  EXPECT_EQ(later, all[0]) << "in their place";
  const auto delta = allocator->restore(pool, *then);
  allocator->end_allocate_to_pool(pool);
  auto freed = delta.freed, allocated = delta.allocated;
  std::sort(freed.begin(), freed.end());
  std::sort(allocated.begin(), allocated.end());
  auto expected_freed = std::vector<void*>{later, small};
  std::sort(expected_freed.begin(), expected_freed.end());
  EXPECT_EQ(freed, expected_freed);
  EXPECT_EQ(allocated, (std::vector<void*>{all[0], all[1]}));
  EXPECT_TRUE(allocator->live_allocations_are(pool, all));
  EXPECT_EQ(allocator->statistics(pool).requested_bytes.all.current, 9 << 20);
  EXPECT_TRUE(allocator->restore(pool, *then).freed.empty()) << "once more changes nothing";
  free(all);
}

TEST_P(allocator_checkpoint_contract, restore_refuses_what_cannot_be) {
  make(k_segments);
  const pool_id pool = allocator->create_pool();
  const pool_id other = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const block = allocator->allocate(12_MiB);
  allocator->end_allocate_to_pool(pool);
  const auto then = allocator->checkpoint(pool);
  EXPECT_TRUE(says(refusal([&] { allocator->restore(other, *then); }), "not of pool 2"));
  allocator->free(block);
  allocator->empty_cache();
  EXPECT_TRUE(says(refusal([&] { allocator->restore(pool, *then); }), "no longer free"));
  EXPECT_TRUE(allocator->live_allocations_are(pool, {}));
}

TEST_P(allocator_checkpoint_contract, restore_refuses_while_blocks_wait_for_streams) {
  make();
  const native_stream side = new_stream();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  const auto all = allocate(2, 3_MiB);
  const auto then = allocator->checkpoint(pool);
  {
    const stream_gate gate(*on, side);
    allocator->record_stream(all[0], side);
    allocator->free(all[0]);
    EXPECT_TRUE(says(refusal([&] { allocator->restore(pool, *then); }), "wait for other streams"));
    EXPECT_TRUE(allocator->live_allocations_are(pool, {all[1]})) << "nothing was changed";
  }
  on->synchronize(side);
  void* const poll = allocator->allocate(3_MiB);
  allocator->free(poll);
  EXPECT_EQ(allocator->restore(pool, *then).allocated.size(), 1u);
  allocator->end_allocate_to_pool(pool);
  free(all);
}

TEST_P(allocator_checkpoint_contract, restore_that_is_refused_changes_nothing) {
  make();
  const native_stream side = new_stream();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  const auto all = allocate(2, 3_MiB);
  const auto then = allocator->checkpoint(pool);
  free(all);
  void* const first = allocator->allocate(3_MiB);
  void* const second = allocator->allocate(3_MiB);
  void* const third = allocator->allocate(1024);
  allocator->free(first == all[0] ? first : second);
  void* const inside = allocator->allocate(2_MiB);  // where a block was
  void* const left = first == all[0] ? second : first;
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(inside, all[0]);
  allocator->record_stream(inside, side);
  const stream_gate gate(*on, side);
  EXPECT_TRUE(says(refusal([&] { allocator->restore(pool, *then); }), "no longer free"));
  EXPECT_TRUE(allocator->live_allocations_are(pool, {left, third, inside}));
  free({left, third, inside});
}

TEST_P(allocator_checkpoint_contract, restore_finds_places_whatever_the_options_became) {
  make(k_segments);
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  allocator->free(allocator->allocate(100_MiB));
  void* const first = allocator->allocate(40_MiB);
  void* const second = allocator->allocate(60_MiB);
  allocator->end_allocate_to_pool(pool);
  const auto then = allocator->checkpoint(pool);
  free({first, second});
  allocator->configure("max_split_size_mb:30");
  EXPECT_EQ(allocator->restore(pool, *then).allocated, (std::vector<void*>{first, second}));
  EXPECT_EQ(block_bytes(first), 40_MiB);
  free({first, second});
}

TEST_P(allocator_checkpoint_contract, restore_in_a_capture_is_refused_before_it_frees) {
  make("cross_stream_reuse:wait");
  const native_stream side = new_stream();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const before = allocator->allocate(3_MiB);
  const auto then = allocator->checkpoint(pool);
  allocator->free(before);
  void* const later = allocator->allocate(6_MiB);
  allocator->end_allocate_to_pool(pool);
  ASSERT_EQ(later, before);
  allocator->record_stream(later, side);
  {
    capture one(*this, allocator->create_pool(), side);
    EXPECT_TRUE(says(refusal([&] { allocator->restore(pool, *then); }), "no longer free"));
    EXPECT_TRUE(allocator->live_allocations_are(pool, {later}));
    one.end();
  }
  EXPECT_EQ(allocator->restore(pool, *then).allocated.size(), 1u);
  allocator->free(before);
}

TEST_P(allocator_checkpoint_contract, checkpoints_of_other_allocators_are_refused) {
  make();
  caching_allocator other(on, device_id{0}, parse_options(""));
  const auto then = other.checkpoint(other.create_pool());
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  void* const block = allocator->allocate(3_MiB);
  allocator->end_allocate_to_pool(pool);
  EXPECT_TRUE(says(refusal([&] { allocator->restore(pool, *then); }), "another allocator"));
  EXPECT_TRUE(allocator->live_allocations_are(pool, {block}));
  allocator->free(block);
}

TEST_P(allocator_checkpoint_contract, a_graph_replays_after_its_pool_was_restored) {
  make();
  const native_stream stream = new_stream();
  const pool_id pool = allocator->create_pool();
  capture one(*this, pool, stream);
  void* const kept = allocator->allocate(3_MiB, stream);
  on->fill(at(kept), std::byte{1}, 3_MiB, stream);
  one.end();
  const auto after_one = allocator->checkpoint(pool);
  allocator->free(kept);
  capture two(*this, pool, stream);
  void* const other = allocator->allocate(3_MiB, stream);
  on->fill(at(other), std::byte{2}, 3_MiB, stream);
  two.end();
  EXPECT_EQ(other, kept) << "its output was dead";
  two.launch(stream);
  const auto delta = allocator->restore(pool, *after_one);
  EXPECT_TRUE(delta.freed.empty() && delta.allocated.empty()) << "the same block lives";
  one.launch(stream);
  EXPECT_TRUE(filled(kept, std::byte{1}, 3_MiB, stream));
  allocator->free(kept);
}

}  // namespace evmm::test
