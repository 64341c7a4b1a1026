// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"
#include "tests/support/scoped_capture.hpp"

#include <algorithm>
#include <cstdlib>
#include <optional>
#include <sstream>

// The other backends: the driver's stream-ordered allocator, and no caching at all.

namespace evmm::test {

class allocator_backend_contract : public allocator_contract {
 protected:
  void TearDown() override {
    ::unsetenv("EVMM_ALLOC_CONF");
    ::unsetenv("EVMM_NO_CACHING");
    allocator.reset();
    if (on) on->trim_async(device_id{0}, 0);
    allocator_contract::TearDown();
  }
  static constexpr const char* k_both[] = {"backend:cudaMallocAsync", "backend:none"};
};

TEST_P(allocator_backend_contract, blocks_hold_their_bytes_until_they_are_freed) {
  for (const char* const backend : k_both) {
    make(backend);
    const native_stream stream = new_stream();
    void* const one = allocator->allocate(3_MiB, stream);
    void* const two = allocator->allocate(700, stream);
    on->synchronize(stream);
    write(one, 3_MiB, 1);
    write(two, 700, 2);
    EXPECT_TRUE(holds(one, 3_MiB, 1) && holds(two, 700, 2)) << backend;
    EXPECT_EQ(at(two) % 512, 0u);
    EXPECT_TRUE(allocator->owns(one));
    EXPECT_EQ(allocator->base_allocation(one).base, one);
    EXPECT_EQ(allocator->base_allocation(one).offset, 0u);
    free({one, two});
    EXPECT_FALSE(allocator->owns(one));
  }
}

TEST_P(allocator_backend_contract, the_memory_fraction_limits_what_is_allocated) {
  for (const char* const backend : k_both) {
    make(backend);
    allow(8_MiB);
    void* const block = allocator->allocate(6_MiB);
    const std::string said = refusal([&] { (void)allocator->allocate(4_MiB); });
    EXPECT_TRUE(says(said, "4.0 MiB") && says(said, "memory fraction")) << backend << ": " << said;
    EXPECT_EQ(allocator->statistics().num_ooms, 1);
    allocator->free(block);
    free({allocator->allocate(8_MiB)});
    allocator->set_memory_fraction(1);
    free({allocator->allocate(16_MiB)});
  }
}

TEST_P(allocator_backend_contract, sizes_and_pointers_are_checked_alike) {
  for (const char* const backend : k_both) {
    make(backend);
    EXPECT_EQ(allocator->allocate(0), nullptr);
    allocator->free(nullptr);
    EXPECT_TRUE(says(refusal([&] { (void)allocator->allocate(std::size_t{1} << 60); }), "1 EiB"));
    void* const block = allocator->allocate(4096);
    allocator->free(block);
    std::ostringstream name;
    name << block;
    EXPECT_TRUE(says(refusal([&] { allocator->free(block); }), name.str())) << backend;
    EXPECT_TRUE(says(refusal([&] { (void)allocator->base_allocation(block); }), name.str()));
    allocator->record_stream(block, new_stream());
    EXPECT_EQ(allocator->allocate_at(block, 4096), nullptr);
  }
}

TEST_P(allocator_backend_contract, live_blocks_are_counted) {
  for (const char* const backend : k_both) {
    make(backend);
    void* const one = allocator->allocate(3_MiB);
    void* const two = allocator->allocate(2_MiB - 1);
    allocator->free(two);
    auto now = allocator->statistics();
    EXPECT_EQ(now.allocation.all, (statistic{.current = 1, .peak = 2, .allocated = 2, .freed = 1}));
    EXPECT_EQ(now.requested_bytes.all.current, 3 << 20);
    EXPECT_EQ(now.requested_bytes.all.peak, (5 << 20) - 1);
    EXPECT_GE(now.reserved_bytes.all.current, 3 << 20) << backend;
    allocator->reset_peaks();
    allocator->reset_totals();
    now = allocator->statistics();
    EXPECT_EQ(now.allocation.all, (statistic{.current = 1, .peak = 1, .allocated = 0, .freed = 0}));
    allocator->free(one);
  }
}

TEST_P(allocator_backend_contract, without_caching_each_call_goes_to_the_driver) {
  make("backend:none");
  const auto before = on->alive();
  void* const one = allocator->allocate(512);
  void* const two = allocator->allocate(512);
  EXPECT_EQ(on->alive().handles - before.handles + on->alive().mappings - before.mappings, 2u)
      << "the mapping keeps the memory";
  EXPECT_NE(allocator->base_allocation(one).bytes, 0u);
  free({one, two});
  EXPECT_EQ(on->alive().mapped_bytes, before.mapped_bytes);
  EXPECT_EQ(allocator->empty_cache(), 0u);
  EXPECT_EQ(allocator->cache_info().cached_bytes, 0u);
}

TEST_P(allocator_backend_contract, without_caching_a_free_waits_for_the_streams) {
  make("backend:none");
  const native_stream owner = new_stream();
  const native_stream other = new_stream();
  void* const block = allocator->allocate(32_MiB, owner);
  on->fill(at(block), std::byte{1}, 16_MiB, owner);
  on->fill(at(block) + 16_MiB, std::byte{2}, 16_MiB, other);
  allocator->record_stream(block, other);
  allocator->free(block);
  EXPECT_EQ(on->alive().mapped_bytes, 0u) << "without waiting the driver would refuse";
}

TEST_P(allocator_backend_contract, the_stream_ordered_backend_orders_a_free_behind_other_streams) {
  make("backend:cudaMallocAsync");
  const native_stream owner = new_stream();
  const native_stream other = new_stream();
  void* const block = allocator->allocate(3_MiB, owner);
  on->synchronize(owner);
  {
    const stream_gate gate(*on, other);
    allocator->record_stream(block, other);
    allocator->free(block);
    EXPECT_FALSE(on->idle(owner)) << "the free waits in stream order; the caller does not";
  }
  on->synchronize(owner);
}

TEST_P(allocator_backend_contract, a_free_under_a_capture_is_refused_and_leaves_it_alone) {
  const native_stream owner = new_stream();
  const native_stream user = new_stream();
  for (const char* const backend : k_both) {
    make(backend);
    void* const block = allocator->allocate(3_MiB, owner);
    allocator->record_stream(block, user);
    {
      scoped_capture graph(*on, user);
      EXPECT_THROW(allocator->free(block), unsupported) << backend;
      EXPECT_EQ(on->capture(owner).status, capture_status::none) << backend;
      EXPECT_EQ(on->capture(user).status, capture_status::active) << backend;
      graph.end();
    }
    allocator->free(block);
  }
}

TEST_P(allocator_backend_contract, the_stream_ordered_backend_gives_back_what_it_cached) {
  make("backend:cudaMallocAsync");
  allocator->free(allocator->allocate(32_MiB));
  on->synchronize(native_stream{nullptr});
  EXPECT_GE(allocator->statistics().reserved_bytes.all.current, 32 << 20);
  EXPECT_GE(allocator->report().mapped_bytes, 32_MiB);
  EXPECT_GE(allocator->cache_info().cached_bytes, 32_MiB);
  EXPECT_GE(allocator->empty_cache(), 32_MiB);
  EXPECT_EQ(allocator->cache_info().cached_bytes, 0u);
}

TEST_P(allocator_backend_contract, what_lives_when_it_goes_is_told_and_freed_behind_its_users) {
  for (const char* const backend : k_both) {
    make(backend);
    const native_stream owner = new_stream();
    const native_stream other = new_stream();
    void* const block = allocator->allocate(3_MiB, owner);
    allocator->record_stream(block, other);
    std::optional<stream_gate> gate;
    const bool ordered = allocator->options().backend == allocator_backend::cuda_malloc_async;
    if (ordered) gate.emplace(*on, other);  // the other one waits itself
    ::testing::internal::CaptureStderr();
    allocator.reset();
    EXPECT_TRUE(says(::testing::internal::GetCapturedStderr(), "1 live allocations"));
    if (ordered) {
      EXPECT_FALSE(on->idle(owner));
    }
    gate.reset();
    on->synchronize(owner);
  }
}

TEST_P(allocator_backend_contract, another_device_reaches_memory_without_caching) {
  if (on->device_count() < 2) GTEST_SKIP() << "one device";
  if (!on->can_access(device_id{1}, device_id{0})) GTEST_SKIP() << "no peer access";
  make("backend:none");
  void* const before = allocator->allocate(3_MiB);
  allocator->enable_peer(device_id{1});
  allocator->enable_peer(device_id{1});
  void* const after = allocator->allocate(3_MiB);
  for (void* each : {before, after}) {
    write_pattern(*on, at(each), 3_MiB, 1, device_id{1});
    EXPECT_TRUE(holds(each, 3_MiB, 1));
  }
  free({before, after});
  make("backend:cudaMallocAsync");
  EXPECT_THROW(allocator->enable_peer(device_id{1}), unsupported);
  EXPECT_THROW(allocator->configure("peers:[1]"), unsupported);
}

TEST_P(allocator_backend_contract, ignored_options_are_told_once) {
  const auto told = [&](const char* config) {
    ::testing::internal::CaptureStderr();
    make(config);
    free({allocator->allocate(3_MiB), allocator->allocate(3_MiB)});
    return ::testing::internal::GetCapturedStderr();
  };
  const std::string said =
      told("backend:cudaMallocAsync,max_split_size_mb:64,garbage_collection_threshold:0.5");
  EXPECT_TRUE(says(said, "max_split_size_mb:64")) << said;
  EXPECT_TRUE(says(said, "garbage_collection_threshold")) << said;
  EXPECT_EQ(std::count(said.begin(), said.end(), '\n'), 1) << said;
  EXPECT_EQ(told("backend:cudaMallocAsync"), "");
  EXPECT_EQ(told("backend:cudaMallocAsync,per_process_memory_fraction:0.5,"
                 "pinned_num_register_threads:8"),
            "")
      << "kept to, or of the pinned allocator";
}

TEST_P(allocator_backend_contract, what_only_the_native_one_can_is_refused) {
  for (const char* const backend : k_both) {
    make(backend);
    void* const block = allocator->allocate(3_MiB);
    EXPECT_THROW(allocator->create_pool(), unsupported);
    EXPECT_THROW((void)allocator->export_allocation(block), unsupported);
    EXPECT_TRUE(allocator->snapshot().segments.empty());
    EXPECT_THROW(allocator->configure("backend:native"), invalid_argument);
    allocator->free(block);
  }
}

TEST_P(allocator_backend_contract, running_out_is_counted_and_told) {
  for (const char* const backend : k_both) {
    make(backend);
    std::size_t told = 0;
    const auto observer = allocator->on_out_of_memory(
        [&](const oom_report& report) { told = report.requested_bytes; });
    const auto total = on->usage(memory_location::on(device_id{0})).total_bytes;
    EXPECT_THROW((void)allocator->allocate(total + 2_MiB), out_of_memory);
    EXPECT_EQ(allocator->statistics().num_ooms, 1) << backend;
    EXPECT_EQ(told, total + 2_MiB);
    free({allocator->allocate(3_MiB)});
  }
}

TEST_P(allocator_backend_contract, the_environment_chooses) {
  ::setenv("EVMM_ALLOC_CONF", "backend:cudaMallocAsync", 1);
  make(options_from_environment());
  EXPECT_EQ(allocator->options().backend, allocator_backend::cuda_malloc_async);
  EXPECT_THROW(allocator->create_pool(), unsupported);
  ::setenv("EVMM_NO_CACHING", "1", 1);
  make(options_from_environment());
  EXPECT_EQ(allocator->options().backend, allocator_backend::none);
  const auto before = on->alive().mapped_bytes;
  free({allocator->allocate(3_MiB)});
  EXPECT_EQ(on->alive().mapped_bytes, before);
}

}  // namespace evmm::test
