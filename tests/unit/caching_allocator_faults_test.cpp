// SPDX-License-Identifier: Apache-2.0
// The caching allocator where calls of the driver fail.
#include "tests/support/allocator_contract.hpp"

#include <evmm/host_driver.hpp>

#include <algorithm>

#include <unistd.h>

namespace evmm::test {
namespace {

std::shared_ptr<fault_driver> machine(std::size_t device_bytes) {
  return fault_driver::make(
      host_driver::make({.devices = 1, .device_bytes = device_bytes, .host_bytes = 64_MiB}));
}

address at(const void* pointer) {
  return reinterpret_cast<address>(pointer);
}

// --- every driver call fails once ---------------------------------------------------------------

struct sweep_case {
  const char* name;
  const char* config;
  error_category category;
  friend void PrintTo(const sweep_case& each, std::ostream* out) { *out << each.name; }
};

class allocator_fault_sweep : public ::testing::TestWithParam<sweep_case> {};

/// Most of what an allocator does; `live` holds what is allocated, whatever happens.
void script(caching_allocator& allocator, native_stream one, native_stream two,
            std::vector<void*>& live) {
  const auto take = [&](std::size_t bytes, native_stream stream) {
    live.push_back(allocator.allocate(bytes, stream));
    return live.back();
  };
  const auto give = [&](void* block) {
    allocator.free(block);
    std::erase(live, block);
  };
  void* const a = take(5_MiB, one);
  void* const b = take(5_MiB, one);
  void* const c = take(700, one);
  void* const d = take(5_MiB, one);
  allocator.record_stream(a, two);
  give(a);
  give(d);
  take(9_MiB, one);  // handles move
  allocator.record_stream(c, two);
  give(c);
  take(12_MiB, two);
  const pool_id pool = allocator.create_pool({.tiers = {tier::device, tier::host}});
  allocator.begin_allocate_to_pool(pool);
  try {
    take(10_MiB, two);
  } catch (...) {
    allocator.end_allocate_to_pool(pool);
    throw;
  }
  allocator.end_allocate_to_pool(pool);
  give(b);
  const ipc_handle shared = allocator.export_allocation(live.front());
  std::shared_ptr<void> imported;
  try {
    imported = allocator.import_allocation(shared);
  } catch (...) {
    for (const int fd : shared.fds) ::close(fd);
    throw;
  }
  for (const int fd : shared.fds) ::close(fd);
  allocator.empty_cache();
  take(7_MiB, two);
}

TEST_P(allocator_fault_sweep, leaves_nothing_and_works_on) {
  const auto faults = machine(64_MiB);
  const native_stream one = faults->create_stream(device_id{0});
  const native_stream two = faults->create_stream(device_id{0});
  const auto before = faults->alive();
  std::size_t failed = 0;
  for (std::size_t nth = 0;; ++nth) {
    SCOPED_TRACE(nth);
    bool happened = false;
    {
      caching_allocator allocator(faults, device_id{0}, parse_options(GetParam().config));
      std::vector<void*> live;
      faults->fail_call(nth, GetParam().category);
      try {
        script(allocator, one, two, live);
      } catch (const error& failure) {
        EXPECT_EQ(failure.category(), GetParam().category) << failure.what();
        ++failed;
      }
      happened = faults->disarm();
      ASSERT_NO_THROW(allocator.check_invariants());
      for (void* each : live) {
        ASSERT_TRUE(allocator.owns(each));
        write_pattern(*faults, at(each), 512, nth);
      }
      for (void* each : live) {
        EXPECT_TRUE(holds_pattern(*faults, at(each), 512, nth));
        allocator.free(each);
      }
      void* const next = allocator.allocate(3_MiB, one);
      write_pattern(*faults, at(next), 3_MiB, 1);
      EXPECT_TRUE(holds_pattern(*faults, at(next), 3_MiB, 1));
      allocator.free(next);
      allocator.empty_cache();
      const auto now = allocator.statistics();
      EXPECT_EQ(now.allocation.all.current, 0);
      EXPECT_EQ(now.active_bytes.all.current, 0);
      EXPECT_EQ(now.reserved_bytes.all.current, 0);
    }
    EXPECT_EQ(faults->alive(), before);
    if (!happened) break;
  }
  EXPECT_GT(failed, 5u) << "else nothing was tested";
  faults->destroy_stream(one);
  faults->destroy_stream(two);
}

INSTANTIATE_TEST_SUITE_P(
    configurations, allocator_fault_sweep,
    ::testing::Values(
        sweep_case{"expandable", "", error_category::driver_error},
        sweep_case{"expandable_out_of_memory", "", error_category::out_of_memory},
        sweep_case{"waits", "recycle_handles:wait,cross_stream_reuse:wait",
                   error_category::driver_error},
        sweep_case{"segments", "expandable_segments:False", error_category::driver_error},
        sweep_case{
            "segments_out_of_memory",
            "expandable_segments:False,max_split_size_mb:24,garbage_collection_threshold:0.5",
            error_category::out_of_memory}),
    [](const auto& info) { return info.param.name; });

TEST(allocator_faults, a_constructor_that_fails_leaves_nothing) {
  const auto faults = machine(64_MiB);
  const auto before = faults->alive();
  for (const char* const config : {"", "backend:cudaMallocAsync", "backend:none"}) {
    for (std::size_t nth = 0;; ++nth) {
      faults->fail_call(nth);
      try {
        const caching_allocator made(faults, device_id{0}, parse_options(config));
      } catch (const error&) {
      }
      if (!faults->disarm()) break;
      EXPECT_EQ(faults->alive(), before) << config << " " << nth;
    }
  }
}

TEST(allocator_faults, a_free_that_fails_can_be_repeated) {
  for (const char* const config :
       {"max_split_size_mb:24", "max_split_size_mb:24,cross_stream_reuse:wait"}) {
    const auto faults = machine(128_MiB);
    const native_stream other = faults->create_stream(device_id{0});
    {
      caching_allocator allocator(faults, device_id{0}, parse_options(config));
      void* const block = allocator.allocate(30_MiB);
      allocator.record_stream(block, other);
      faults->fail_call(driver_call::record, 0);
      EXPECT_THROW(allocator.free(block), driver_error);
      EXPECT_TRUE(allocator.owns(block)) << "nothing happened";
      EXPECT_EQ(allocator.statistics().oversize_allocations.current, 1);
      allocator.free(block);
      EXPECT_EQ(allocator.statistics().oversize_allocations.current, 0) << config;
      EXPECT_EQ(allocator.statistics().allocation.all.current, 0);
      allocator.empty_cache();
    }
    faults->destroy_stream(other);
  }
}

TEST(allocator_faults, a_free_of_another_backend_that_fails_can_be_repeated) {
  for (const auto& [config, call] : {std::pair{"backend:cudaMallocAsync", driver_call::record},
                                     std::pair{"backend:cudaMallocAsync", driver_call::wait},
                                     std::pair{"backend:cudaMallocAsync", driver_call::free_async},
                                     std::pair{"backend:none", driver_call::synchronize_stream}}) {
    const auto faults = machine(64_MiB);
    const auto before = faults->alive();
    const native_stream other = faults->create_stream(device_id{0});
    {
      caching_allocator allocator(faults, device_id{0}, parse_options(config));
      void* const block = allocator.allocate(3_MiB);
      allocator.record_stream(block, other);
      faults->fail_call(call, 0);
      EXPECT_THROW(allocator.free(block), driver_error);
      EXPECT_TRUE(allocator.owns(block)) << "nothing happened";
      EXPECT_EQ(allocator.statistics().allocation.all.freed, 0);
      allocator.free(block);
      EXPECT_EQ(allocator.statistics().allocation.all.current, 0);
    }
    faults->destroy_stream(other);
    faults->trim_async(device_id{0}, 0);
    EXPECT_EQ(faults->alive(), before) << config;
  }
}

TEST(allocator_faults, the_other_backends_survive_failures) {
  for (const char* const config : {"backend:cudaMallocAsync", "backend:none"}) {
    const auto faults = machine(64_MiB);
    const auto before = faults->alive();
    for (std::size_t nth = 0;; ++nth) {
      {
        caching_allocator allocator(faults, device_id{0}, parse_options(config));
        void* block = nullptr;
        faults->fail_call(nth);
        try {
          block = allocator.allocate(3_MiB);
        } catch (const error&) {
        }
        const bool happened = faults->disarm();
        allocator.free(block);
        EXPECT_EQ(allocator.statistics().allocation.all.current, 0);
        if (!happened) nth = 1000;
      }
      faults->trim_async(device_id{0}, 0);
      EXPECT_EQ(faults->alive(), before) << config << " " << nth;
      if (nth >= 1000) break;
    }
  }
}

}  // namespace
}  // namespace evmm::test
