// SPDX-License-Identifier: Apache-2.0
// What the caching allocator waits for, and who waits meanwhile, on drivers that are held still.
#include "tests/support/fault_driver.hpp"
#include "tests/support/forwarding_driver.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

address at(const void* pointer) {
  return reinterpret_cast<address>(pointer);
}

/// Opens the gate of whatever event somebody waits for, and no other.
class waiting_driver final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  void record(native_event event, native_stream stream) override {
    forwarding_driver::record(event, stream);
    recorded_[event] = stream;
  }
  void synchronize(native_event event) override {
    ++waits;
    gates.erase(recorded_.at(event));
    forwarding_driver::synchronize(event);
  }
  void synchronize(native_stream stream) override {
    gates.erase(stream);
    forwarding_driver::synchronize(stream);
  }
  std::map<native_stream, std::unique_ptr<stream_gate>> gates;
  int waits = 0;

 private:
  std::map<native_event, native_stream> recorded_;
};

TEST(allocator_waits, for_one_event_where_that_is_enough) {
  for (const char* const config : {"", "expandable_segments:False"}) {
    const auto on =
        std::make_shared<waiting_driver>(host_driver::make({.devices = 1, .device_bytes = 40_MiB}));
    const std::vector<native_stream> users = {on->create_stream({0}), on->create_stream({0})};
    {
      caching_allocator allocator(on, device_id{0}, parse_options(config));
      std::vector<void*> blocks;
      for (native_stream each : users) {
        blocks.push_back(allocator.allocate(20_MiB));
        on->gates[each] = std::make_unique<stream_gate>(*on, each);
        allocator.record_stream(blocks.back(), each);
      }
      for (void* each : blocks) allocator.free(each);
      void* const block = allocator.allocate(20_MiB);
      EXPECT_EQ(on->waits, 1) << config;
      EXPECT_EQ(on->gates.size(), 1u) << "the other stream is still held";
      EXPECT_EQ(allocator.statistics().num_alloc_retries, 0);
      EXPECT_EQ(allocator.statistics().num_sync_all_streams, 0);
      allocator.free(block);
    }
    for (native_stream each : users) on->destroy_stream(each);
  }
}

TEST(allocator_waits, for_blocks_of_pools_that_help_out_too) {
  for (const char* const config : {"", ",recycle_handles:never"}) {
    const auto on =
        std::make_shared<waiting_driver>(host_driver::make({.devices = 1, .device_bytes = 20_MiB}));
    const native_stream user = on->create_stream({0});
    {
      caching_allocator allocator(on, device_id{0},
                                  parse_options(std::string("expandable_segments:False") + config));
      const pool_id helper = allocator.create_pool({.use_on_oom = true});
      allocator.begin_allocate_to_pool(helper);
      void* const lent = allocator.allocate(8_MiB);
      void* const live = allocator.allocate(8_MiB);
      allocator.end_allocate_to_pool(helper);
      on->gates[user] = std::make_unique<stream_gate>(*on, user);
      allocator.record_stream(lent, user);
      allocator.free(lent);
      EXPECT_EQ(allocator.allocate(7_MiB), lent);
      EXPECT_EQ(allocator.statistics().num_alloc_retries, 0);
      for (void* each : {lent, live}) allocator.free(each);
    }
    on->destroy_stream(user);
  }
}

TEST(allocator_waits, for_a_block_that_more_memory_makes_large_enough) {
  const auto on =
      std::make_shared<waiting_driver>(host_driver::make({.devices = 1, .device_bytes = 32_MiB}));
  const native_stream user = on->create_stream({0});
  {
    caching_allocator allocator(
        on, device_id{0},
        parse_options("recycle_handles:never,min_handle_size_mb:16,max_handle_size_mb:16"));
    allocator.free(allocator.allocate(16_MiB));  // on one handle
    void* const live = allocator.allocate(8_MiB);
    void* const lent = allocator.allocate(8_MiB);
    on->gates[user] = std::make_unique<stream_gate>(*on, user);
    allocator.record_stream(lent, user);
    allocator.free(lent);
    void* const block = allocator.allocate(20_MiB);
    EXPECT_EQ(block, lent) << "and what was made behind it";
    for (void* each : {live, block}) allocator.free(each);
  }
  on->destroy_stream(user);
}

TEST(allocator_waits, for_all_that_use_its_memory_before_it_goes) {
  for (const char* const config : {"", "expandable_segments:False", "backend:none"}) {
    const auto on = std::make_shared<waiting_driver>(host_driver::make());
    const native_stream owner = on->create_stream({0});
    const std::vector<native_stream> users = {on->create_stream({0}), on->create_stream({0})};
    {
      caching_allocator allocator(on, device_id{0}, parse_options(config));
      void* const freed = allocator.allocate(3_MiB, owner);
      void* const live = allocator.allocate(3_MiB, owner);
      on->gates[users[0]] = std::make_unique<stream_gate>(*on, users[0]);
      on->gates[users[1]] = std::make_unique<stream_gate>(*on, users[1]);
      allocator.record_stream(freed, users[0]);
      allocator.record_stream(live, users[1]);
      allocator.free(freed);
    }
    EXPECT_TRUE(on->gates.empty()) << config;
    for (native_stream each : users) on->destroy_stream(each);
    on->destroy_stream(owner);
  }
}

TEST(allocator_waits, for_the_event_that_was_recorded_first) {
  const auto on =
      std::make_shared<waiting_driver>(host_driver::make({.devices = 1, .device_bytes = 40_MiB}));
  std::vector<native_stream> users = {on->create_stream({0}), on->create_stream({0})};
  for (int turn = 0; turn < 2; ++turn) {
    std::swap(users[0], users[1]);  // whatever their numbers
    caching_allocator allocator(on, device_id{0});
    std::vector<void*> blocks;
    for (native_stream each : users) {
      blocks.push_back(allocator.allocate(20_MiB));
      on->gates[each] = std::make_unique<stream_gate>(*on, each);
      allocator.record_stream(blocks.back(), each);
    }
    for (void* each : blocks) allocator.free(each);
    on->waits = 0;
    EXPECT_EQ(allocator.allocate(20_MiB), blocks[0]) << "its event was recorded first";
    allocator.free(blocks[0]);
    on->gates.clear();
  }
  for (native_stream each : users) on->destroy_stream(each);
}

TEST(allocator_waits, for_no_stream_when_garbage_is_collected) {
  const auto on =
      std::make_shared<waiting_driver>(host_driver::make({.devices = 1, .device_bytes = 80_MiB}));
  const native_stream busy = on->create_stream({0});
  const native_stream idle = on->create_stream({0});
  {
    caching_allocator allocator(
        on, device_id{0},
        parse_options("expandable_segments:False,garbage_collection_threshold:0.25"));
    void* const first = allocator.allocate(20_MiB, busy);
    void* const second = allocator.allocate(20_MiB, idle);
    allocator.free(first);
    allocator.free(second);
    on->gates[busy] = std::make_unique<stream_gate>(*on, busy);
    void* const block = allocator.allocate(20_MiB);
    EXPECT_EQ(on->gates.size(), 1u) << "nobody waited for it";
    EXPECT_EQ(allocator.statistics().num_device_free, 1) << "what the idle one had";
    on->gates.clear();
    allocator.free(block);
  }
  on->destroy_stream(busy);
  on->destroy_stream(idle);
}

TEST(allocator_waits, for_a_busy_stream_only_when_nothing_else_is_left) {
  const auto on =
      std::make_shared<waiting_driver>(host_driver::make({.devices = 1, .device_bytes = 40_MiB}));
  const native_stream busy = on->create_stream({0});
  {
    caching_allocator allocator(on, device_id{0}, parse_options("expandable_segments:False"));
    allocator.free(allocator.allocate(20_MiB, busy));
    on->gates[busy] = std::make_unique<stream_gate>(*on, busy);
    void* const first = allocator.allocate(20_MiB);
    EXPECT_EQ(on->gates.size(), 1u);
    void* const second = allocator.allocate(20_MiB);
    EXPECT_TRUE(on->gates.empty()) << "now it had to be waited for";
    EXPECT_EQ(allocator.statistics().num_alloc_retries, 1);
    allocator.free(first);
    allocator.free(second);
  }
  on->destroy_stream(busy);
}

TEST(allocator_waits, by_the_stream_alone_where_memory_can_be_mapped_behind_its_work) {
  const auto on =
      std::make_shared<waiting_driver>(host_driver::make({.devices = 1, .device_bytes = 40_MiB}));
  const native_stream busy = on->create_stream({0});
  const native_stream needy = on->create_stream({0});
  {
    caching_allocator allocator(on, device_id{0});
    allocator.free(allocator.allocate(40_MiB, busy));
    on->gates[busy] = std::make_unique<stream_gate>(*on, busy);
    void* const block = allocator.allocate(40_MiB, needy);
    EXPECT_EQ(on->gates.size(), 1u) << "the caller did not wait";
    on->fill(at(block), std::byte{1}, 512, needy);
    EXPECT_FALSE(on->idle(needy)) << "its stream does";
    EXPECT_EQ(allocator.statistics().num_alloc_retries, 1);
    on->gates.clear();
    allocator.free(block);
  }
  on->destroy_stream(busy);
  on->destroy_stream(needy);
}

/// Holds the caller of create() or map() while it is closed.
class slow_driver final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  allocation_handle create(const allocation_request& request) override {
    pass();
    return forwarding_driver::create(request);
  }
  void map(address where, std::size_t bytes, allocation_handle handle) override {
    pass();
    forwarding_driver::map(where, bytes, handle);
  }
  std::atomic<bool> closed = false;
  std::promise<void> reached, open;

 private:
  void pass() {
    if (!closed) return;
    reached.set_value();
    open.get_future().wait();
  }
};

TEST(allocator_waits, no_stream_whose_requests_are_cached_waits_while_the_driver_makes_memory) {
  const auto on = std::make_shared<slow_driver>(host_driver::make({.devices = 1}));
  const native_stream one = on->create_stream({0});
  const native_stream two = on->create_stream({0});
  {
    caching_allocator allocator(on, device_id{0});
    void* const live = allocator.allocate(4096, two);
    void* const cached = allocator.allocate(4096, two);
    allocator.free(cached);
    on->closed = true;
    void* made = nullptr;
    std::thread slowly([&] { made = allocator.allocate(1_MiB + 512, one); });
    on->reached.get_future().wait();
    on->closed = false;
    EXPECT_EQ(allocator.allocate(4096, two), cached);
    allocator.free(cached);
    on->open.set_value();
    slowly.join();
    allocator.free(made);
    allocator.free(live);
  }
  on->destroy_stream(one);
  on->destroy_stream(two);
}

TEST(allocator_waits, neither_giver_nor_taker_of_memory_is_locked_while_the_driver_maps_it) {
  const auto on =
      std::make_shared<slow_driver>(host_driver::make({.devices = 1, .device_bytes = 48_MiB}));
  const native_stream taker = on->create_stream({0});
  const native_stream giver = on->create_stream({0});
  {
    caching_allocator allocator(on, device_id{0});
    std::vector<void*> live, cached;
    for (const native_stream stream : {taker, giver}) {
      live.push_back(allocator.allocate(4096, stream));
      cached.push_back(allocator.allocate(4096, stream));
      allocator.free(cached.back());
    }
    allocator.free(allocator.allocate(40_MiB, giver));
    const auto before = allocator.statistics();
    on->closed = true;
    void* moved = nullptr;
    std::thread slowly([&] { moved = allocator.allocate(40_MiB, taker); });
    on->reached.get_future().wait();
    on->closed = false;
    EXPECT_EQ(allocator.allocate(4096, giver), cached[1]);
    EXPECT_EQ(allocator.allocate(4096, taker), cached[0]);
    for (void* each : cached) allocator.free(each);
    on->open.set_value();
    slowly.join();
    allocator.check_invariants();
    EXPECT_GT(allocator.statistics().handles_recycled, before.handles_recycled);
    EXPECT_EQ(allocator.statistics().num_device_alloc, before.num_device_alloc);
    allocator.free(moved);
    for (void* each : live) allocator.free(each);
  }
  on->destroy_stream(taker);
  on->destroy_stream(giver);
}

TEST(allocator_waits, what_was_to_move_stays_where_it_is_when_the_driver_fails) {
  const auto on = fault_driver::make(
      host_driver::make({.devices = 1, .device_bytes = 48_MiB, .host_bytes = 64_MiB}));
  const native_stream taker = on->create_stream({0});
  const native_stream giver = on->create_stream({0});
  {
    caching_allocator allocator(on, device_id{0});
    void* const first = allocator.allocate(40_MiB, giver);
    allocator.free(first);
    const auto before = on->alive();
    for (const driver_call kind : {driver_call::map, driver_call::set_access}) {
      on->fail_call(kind, 0);
      EXPECT_THROW(std::ignore = allocator.allocate(40_MiB, taker), driver_error);
      EXPECT_TRUE(on->disarm());
      allocator.check_invariants();
      EXPECT_EQ(on->alive().mappings, before.mappings);
      EXPECT_EQ(on->alive().handles, before.handles);
    }
    void* const again = allocator.allocate(40_MiB, giver);
    EXPECT_EQ(again, first) << "without a mapping";
    EXPECT_EQ(on->alive().mappings, before.mappings);
    allocator.free(again);
  }
  on->destroy_stream(taker);
  on->destroy_stream(giver);
}

}  // namespace
}  // namespace evmm::test
