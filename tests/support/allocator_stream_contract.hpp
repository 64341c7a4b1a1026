// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

#include <algorithm>
#include <cstddef>
#include <memory>
#include <thread>

// Memory belongs to the stream it was allocated on; record_stream tells of others.

namespace evmm::test {

class allocator_stream_contract : public allocator_contract {
 protected:
  std::size_t calls(driver_call kind) const {
    const auto all = on->record_of_calls();
    return static_cast<std::size_t>(std::count(all.begin(), all.end(), kind));
  }
};

TEST_P(allocator_stream_contract, a_freed_block_is_reused_on_its_stream_at_once) {
  make();
  const native_stream stream = new_stream();
  void* const first = allocator->allocate(3_MiB, stream);
  const stream_gate gate(*on, stream);
  on->clear_record();
  allocator->free(first);
  EXPECT_EQ(allocator->allocate(3_MiB, stream), first);
  EXPECT_TRUE(on->record_of_calls().empty()) << "no driver call where the cache serves";
  allocator->free(first);
}

TEST_P(allocator_stream_contract, a_block_of_a_busy_stream_serves_no_other) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    const native_stream busy = new_stream();
    void* const first = allocator->allocate(3_MiB, busy);
    const stream_gate gate(*on, busy);
    allocator->free(first);
    void* const second = allocator->allocate(3_MiB, new_stream());
    EXPECT_NE(second, first);
    EXPECT_EQ(allocator->base_allocation(second).offset, 0u) << "other memory";
    allocator->free(second);
  }
}

TEST_P(allocator_stream_contract, record_stream_keeps_a_freed_block_until_that_stream_is_past_it) {
  make();
  const native_stream other = new_stream();
  void* const first = allocator->allocate(3_MiB);
  void* second = nullptr;
  {
    const stream_gate gate(*on, other);
    allocator->record_stream(first, other);
    allocator->free(first);
    EXPECT_FALSE(allocator->owns(first));
    second = allocator->allocate(3_MiB);
    EXPECT_NE(second, first);
  }
  on->synchronize(other);
  void* const third = allocator->allocate(3_MiB);
  EXPECT_EQ(third, first);
  free({second, third});
}

TEST_P(allocator_stream_contract, a_block_waits_for_all_its_streams) {
  make();
  const native_stream one = new_stream();
  const native_stream two = new_stream();
  void* const first = allocator->allocate(3_MiB);
  stream_gate gate_one(*on, one);
  gate_one.wait_reached();  // both may run on one thread: first come, first out
  stream_gate gate_two(*on, two);
  for (native_stream each : {one, two}) allocator->record_stream(first, each);
  allocator->free(first);
  gate_one.open();
  on->synchronize(one);
  void* const second = allocator->allocate(3_MiB);
  EXPECT_NE(second, first);
  EXPECT_EQ(allocator->statistics().active.all.current, 2);
  gate_two.open();
  on->synchronize(two);
  void* const third = allocator->allocate(3_MiB);
  EXPECT_EQ(third, first);
  free({second, third});
}

TEST_P(allocator_stream_contract, only_work_enqueued_before_the_free_is_waited_for) {
  make();
  const native_stream other = new_stream();
  void* const first = allocator->allocate(3_MiB);
  allocator->record_stream(first, other);
  on->fill(at(first), std::byte{1}, 512, other);
  allocator->free(first);
  on->synchronize(other);
  const stream_gate later(*on, other);
  EXPECT_EQ(allocator->allocate(3_MiB), first);
  allocator->free(first);
}

TEST_P(allocator_stream_contract, reuse_by_wait_orders_the_next_user_behind_the_streams) {
  make("cross_stream_reuse:wait");
  const native_stream owner = new_stream();
  const native_stream other = new_stream();
  void* const first = allocator->allocate(3_MiB, owner);
  {
    const stream_gate gate(*on, other);
    on->fill(at(first), std::byte{1}, 3_MiB, other);
    allocator->record_stream(first, other);
    allocator->free(first);
    EXPECT_EQ(allocator->allocate(3_MiB, owner), first) << "at once";
    on->fill(at(first), std::byte{2}, 3_MiB, owner);
    EXPECT_FALSE(on->idle(owner));
  }
  std::vector<std::byte> found(3_MiB);
  on->copy(at(found.data()), at(first), 3_MiB, owner);
  on->synchronize(owner);
  EXPECT_EQ(std::count(found.begin(), found.end(), std::byte{2}), 3 << 20);
  EXPECT_EQ(allocator->statistics().active.all.current, 1);
  allocator->free(first);
}

TEST_P(allocator_stream_contract, a_stream_recorded_twice_costs_one_event) {
  make();
  const native_stream other = new_stream();
  void* const block = allocator->allocate(3_MiB);
  for (int i = 0; i < 3; ++i) allocator->record_stream(block, other);
  on->clear_record();
  allocator->free(block);
  EXPECT_EQ(calls(driver_call::record), 1u);
  EXPECT_EQ(calls(driver_call::synchronize_stream) + calls(driver_call::synchronize_event), 0u);
}

TEST_P(allocator_stream_contract, own_streams_null_and_foreign_pointers_are_not_recorded) {
  make();
  const native_stream own = new_stream();
  void* const block = allocator->allocate(3_MiB, own);
  int foreign = 0;
  allocator->record_stream(nullptr, own);
  allocator->record_stream(&foreign, own);
  allocator->record_stream(block, own);
  on->clear_record();
  allocator->free(block);
  allocator->record_stream(block, new_stream());
  EXPECT_EQ(calls(driver_call::record), 0u);
  EXPECT_EQ(allocator->allocate(3_MiB, own), block) << "the use of a block that is gone is none";
  allocator->free(block);
}

TEST_P(allocator_stream_contract, events_are_used_again) {
  make();
  const native_stream other = new_stream();
  const auto round = [&] {
    void* const block = allocator->allocate(3_MiB);
    allocator->record_stream(block, other);
    allocator->free(block);
    on->synchronize(other);
  };
  for (int i = 0; i < 3; ++i) round();
  on->clear_record();
  for (int i = 0; i < 20; ++i) round();
  EXPECT_EQ(calls(driver_call::create_event), 0u);
}

TEST_P(allocator_stream_contract, a_block_may_be_freed_by_another_thread) {
  make();
  const native_stream stream = new_stream();
  const auto all = allocate(8, 1_MiB + 512, stream);
  std::thread([&] { free(all); }).join();
  EXPECT_EQ(allocator->statistics().allocation.all.current, 0);
  const auto again = allocate(8, 1_MiB + 512, stream);
  auto sorted = all;
  auto sorted_again = again;
  std::sort(sorted.begin(), sorted.end());
  std::sort(sorted_again.begin(), sorted_again.end());
  EXPECT_EQ(sorted_again, sorted) << "the stream's memory, whoever freed it";
  free(again);
}

TEST_P(allocator_stream_contract, blocks_of_a_thread_that_ended_live_on) {
  make();
  const native_stream stream = new_stream();
  void* block = nullptr;
  std::thread([&] {
    block = allocator->allocate(3_MiB, stream);
    write(block, 3_MiB, 1);
  }).join();
  EXPECT_TRUE(holds(block, 3_MiB, 1));
  allocator->free(block);
  std::thread([&] {
    EXPECT_EQ(allocator->allocate(3_MiB, stream), block);
    allocator->free(block);
  }).join();
}

TEST_P(allocator_stream_contract, threads_may_share_a_stream) {
  make();
  const native_stream stream = new_stream();
  std::vector<std::thread> threads;
  std::vector<std::vector<void*>> kept(4);
  for (std::size_t t = 0; t < kept.size(); ++t) {
    threads.emplace_back([&, t] {
      for (std::size_t i = 0; i < 300; ++i) {
        kept[t].push_back(allocator->allocate(512 * (1 + i % 7), stream));
        if (i % 3 == 0) {
          allocator->free(kept[t].front());
          kept[t].erase(kept[t].begin());
        }
      }
    });
  }
  for (auto& each : threads) each.join();
  std::vector<std::pair<address, std::size_t>> all;
  for (const auto& mine : kept) {
    for (void* each : mine) all.push_back({at(each), block_bytes(each)});
  }
  std::sort(all.begin(), all.end());
  for (std::size_t i = 1; i < all.size(); ++i) {
    ASSERT_GE(all[i].first, all[i - 1].first + all[i - 1].second) << "two live blocks overlap";
  }
  for (const auto& mine : kept) free(mine);
}

TEST_P(allocator_stream_contract, one_thread_may_use_more_streams_than_it_remembers) {
  make();
  std::vector<native_stream> streams;
  for (int i = 0; i < 24; ++i) streams.push_back(new_stream());
  std::vector<void*> first;
  for (native_stream each : streams) first.push_back(allocator->allocate(4096, each));
  free(first);
  for (std::size_t i = 0; i < streams.size(); ++i) {
    EXPECT_EQ(allocator->allocate(4096, streams[i]), first[i]);
  }
  free(first);
}

TEST_P(allocator_stream_contract, a_stream_that_was_emptied_can_be_destroyed) {
  make();
  const native_stream gone = on->create_stream(device_id{0});
  void* const block = allocator->allocate(3_MiB);
  allocator->record_stream(block, gone);
  allocator->free(block);
  on->synchronize(gone);
  allocator->empty_cache();
  on->destroy_stream(gone);
  void* const next = allocator->allocate(3_MiB);
  allocator->free(next);
}

TEST_P(allocator_stream_contract, streams_that_went_leave_no_addresses_reserved) {
  make();
  void* const kept = allocator->allocate(3_MiB);
  const auto before = on->alive();
  for (int i = 0; i < 3; ++i) {
    const native_stream gone = on->create_stream(device_id{0});
    const auto all = allocate(4, 3_MiB, gone);
    free({all[0], all[2]});
    void* const elsewhere = allocator->allocate(6_MiB);  // may take what is free there
    free({all[1], all[3], elsewhere, allocator->allocate(512, gone)});
    on->synchronize(gone);
    allocator->empty_cache();
    on->destroy_stream(gone);
  }
  EXPECT_EQ(on->alive().reserved_bytes, before.reserved_bytes);
  EXPECT_TRUE(allocator->owns(kept));
  allocator->free(kept);
}

}  // namespace evmm::test
