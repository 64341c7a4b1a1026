// SPDX-License-Identifier: Apache-2.0
// Which streams the caching allocator asks and waits for, and which default stream it means.
#include "tests/support/fault_driver.hpp"
#include "tests/support/one_default_stream.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

address at(const void* pointer) {
  return reinterpret_cast<address>(pointer);
}

TEST(allocator_streams, the_default_stream_is_that_of_its_device) {
  const auto inner = host_driver::make({.devices = 2, .device_bytes = 64_MiB});
  const auto on = std::make_shared<one_default_stream>(inner, device_id{1});
  on->set_current_device(device_id{0});
  const native_stream origin = on->create_stream(device_id{1});
  {
    caching_allocator allocator(on, device_id{1});
    const pool_id pool = allocator.create_pool();
    allocator.begin_allocate_to_pool(pool);
    allocator.begin_capture(pool);
    inner->begin_capture(origin);
    void* const captured = allocator.allocate(3_MiB, origin);
    on->fill(at(captured), std::byte{1}, 512, origin);
    allocator.record_stream(captured, nullptr);
    allocator.free(captured);
    const auto graph = inner->end_capture(origin);
    const int before = on->uses();
    allocator.end_capture(pool);
    EXPECT_GT(on->uses(), before) << "its event was recorded";
    allocator.end_allocate_to_pool(pool);
    allocator.release_pool(pool);
    void* const shared = allocator.allocate(3_MiB, origin);
    allocator.record_stream(shared, nullptr);
    allocator.free(shared);
    allocator.free(allocator.allocate(3_MiB));
    allocator.empty_cache();
  }
  EXPECT_EQ(on->current_device(), device_id{0});
  on->destroy_stream(origin);
}

TEST(allocator_streams, one_without_memory_here_need_not_exist) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 64_MiB});
  for (const char* const config : {"", "expandable_segments:False"}) {
    caching_allocator allocator(on, device_id{0}, parse_options(config));
    allocator.configure("garbage_collection_threshold:0.25");
    const native_stream gone = on->create_stream(device_id{0});
    allocator.free(allocator.allocate(3_MiB, gone));
    allocator.empty_cache();
    on->destroy_stream(gone);
    void* const live = allocator.allocate(30_MiB);
    EXPECT_NO_THROW(allocator.free(allocator.allocate(30_MiB))) << "with garbage to be collected";
    EXPECT_THROW((void)allocator.allocate(40_MiB), out_of_memory) << "with all that is tried then";
    allocator.free(live);
  }
}

TEST(allocator_streams, what_others_are_past_is_free_whoever_asks) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 256_MiB});
  const native_stream owner = on->create_stream(device_id{0});
  const native_stream user = on->create_stream(device_id{0});
  {
    caching_allocator allocator(on, device_id{0});
    void* const block = allocator.allocate(40_MiB, owner);
    allocator.record_stream(block, user);
    allocator.free(block);
    on->synchronize(user);
    void* const next = allocator.allocate(40_MiB, user);  // and the owner never asks again
    const auto now = allocator.statistics();
    EXPECT_EQ(now.active_bytes.all.peak, 40 << 20);
    EXPECT_LE(now.reserved_bytes.all.current, 48 << 20);
    allocator.free(next);
  }
  on->destroy_stream(owner);
  on->destroy_stream(user);
}

TEST(allocator_streams, the_one_name_of_many_streams_is_refused) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 64_MiB});
  const auto per_thread = reinterpret_cast<native_stream>(std::uintptr_t{2});
  for (const char* const config : {"", "backend:cudaMallocAsync", "backend:none"}) {
    caching_allocator allocator(on, device_id{0}, parse_options(config));
    void* const block = allocator.allocate(3_MiB);
    EXPECT_THROW((void)allocator.allocate(3_MiB, per_thread), unsupported) << config;
    EXPECT_THROW((void)allocator.allocate(3_MiB, per_thread), unsupported) << config;
    EXPECT_THROW(allocator.record_stream(block, per_thread), unsupported) << config;
    allocator.free(block);
  }
}

TEST(allocator_streams, hundreds_have_their_own_memory) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 144_GiB});
  std::vector<native_stream> streams;
  {
    caching_allocator allocator(on, device_id{0});
    std::vector<void*> blocks;
    for (int i = 0; i < 500; ++i) {
      streams.push_back(on->create_stream(device_id{0}));
      blocks.push_back(allocator.allocate(512, streams.back()));
      blocks.push_back(allocator.allocate(2_MiB, streams.back()));
    }
    void* const large = allocator.allocate(8_GiB, streams.back());
    EXPECT_EQ(allocator.base_allocation(large).block_bytes, 8_GiB)
        << "more than a late segment has";
    allocator.free(large);
    for (void* each : blocks) allocator.free(each);
  }
  for (native_stream each : streams) on->destroy_stream(each);
}

TEST(allocator_streams, a_pool_waits_for_the_graphs_that_replay_on_its_memory) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 64_MiB});
  const native_stream origin = on->create_stream(device_id{0});
  const native_stream replays = on->create_stream(device_id{0});
  {
    caching_allocator allocator(on, device_id{0});
    void* const result = allocator.allocate(1_MiB, replays);
    const pool_id pool = allocator.create_pool();
    allocator.begin_allocate_to_pool(pool);
    allocator.begin_capture(pool);
    on->begin_capture(origin);
    void* const scratch = allocator.allocate(3_MiB, origin);
    // What runs after its memory has gone ends the process.
    for (int i = 0; i < 100; ++i) on->fill(at(scratch), std::byte{1}, 3_MiB, origin);
    on->copy(at(result), at(scratch), 1_MiB, origin);
    allocator.free(scratch);
    const auto graph = on->end_capture(origin);
    allocator.end_capture(pool);
    allocator.end_allocate_to_pool(pool);
    on->launch_graph(graph, replays);
    allocator.release_pool(pool);
    EXPECT_TRUE(on->idle(replays));
    EXPECT_EQ(static_cast<const std::byte*>(result)[1_MiB - 1], std::byte{1});
    allocator.free(result);
  }
  on->destroy_stream(origin);
  on->destroy_stream(replays);
}

}  // namespace
}  // namespace evmm::test
