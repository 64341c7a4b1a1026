// SPDX-License-Identifier: Apache-2.0
// The caching allocator on a device that is soon full: what it tries, and what its errors advise.
#include "tests/support/fault_driver.hpp"
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/refusal.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

class small_device : public ::testing::Test {
 protected:
  caching_allocator& make(std::string_view config) {
    return allocator.emplace(on, device_id{0}, parse_options(config));
  }
  /// Three segments of 20 MiB, each with a live block of 5 MiB at its start.
  void scatter() {
    for (int i = 0; i < 12; ++i) {
      void* const block = allocator->allocate(5_MiB);
      (i % 4 == 0 ? live : dead).push_back(block);
    }
    for (void* each : dead) allocator->free(each);
  }
  void TearDown() override {
    for (void* each : live) allocator->free(each);
  }
  const std::shared_ptr<fault_driver> on = fault_driver::make(
      host_driver::make({.devices = 1, .device_bytes = 64_MiB, .host_bytes = 64_MiB}));
  std::optional<caching_allocator> allocator;
  std::vector<void*> live, dead;
};

TEST_F(small_device, names_expandable_segments_where_they_would_help) {
  make("expandable_segments:False");
  scatter();
  const std::string said = refusal([&] { (void)allocator->allocate(30_MiB); });
  EXPECT_TRUE(says(said, "help: set expandable_segments:True")) << said;
  EXPECT_TRUE(says(said, "4.0 MiB of 64.0 MiB are free on the device")) << said;
}

TEST_F(small_device, expandable_segments_do_help) {
  make("");
  scatter();
  live.push_back(allocator->allocate(30_MiB));
  EXPECT_EQ(allocator->statistics().num_ooms, 0);
}

TEST_F(small_device, without_recycling_memory_between_live_blocks_is_given_back_and_made_anew) {
  make("recycle_handles:never");
  for (int i = 0; i < 6; ++i) live.push_back(allocator->allocate(10_MiB));
  for (const std::ptrdiff_t i : {4, 2, 0}) {
    allocator->free(live[static_cast<std::size_t>(i)]);
    live.erase(live.begin() + i);
  }
  live.push_back(allocator->allocate(30_MiB));
  const auto now = allocator->statistics();
  EXPECT_EQ(now.num_alloc_retries, 1);
  EXPECT_GE(now.num_device_free, 13);
  EXPECT_EQ(now.handles_recycled + now.handles_claimed, 0);
}

TEST_F(small_device, a_request_that_fails_leaves_others_what_it_did_not_get) {
  make("");
  live.push_back(allocator->allocate(20_MiB));
  EXPECT_TRUE(says(refusal([&] { (void)allocator->allocate(60_MiB); }), "44.0 MiB of 64.0 MiB"));
  EXPECT_EQ(allocator->report().free_bytes, 44_MiB);
}

TEST_F(small_device, a_request_that_fails_leaves_host_memory_too) {
  make("");
  for (const bool span : {false, true}) {
    const pool_id pool =
        allocator->create_pool({.tiers = {tier::device, tier::host}, .may_span = span});
    allocator->begin_allocate_to_pool(pool);
    void* const kept = allocator->allocate(4_MiB);
    EXPECT_THROW((void)allocator->allocate(130_MiB), out_of_memory);
    EXPECT_EQ(allocator->report().host_tier_bytes, 0u);
    EXPECT_LE(allocator->report().reserved_bytes, 4_MiB);
    EXPECT_NO_THROW(allocator->check_invariants());
    allocator->end_allocate_to_pool(pool);
    allocator->free(kept);
    allocator->release_pool(pool);
  }
}

TEST_F(small_device, a_request_takes_what_the_driver_has_and_what_is_free_besides) {
  make("");
  for (int i = 0; i < 4; ++i) live.push_back(allocator->allocate(10_MiB));
  allocator->free(live[0]);
  allocator->free(live[2]);
  live = {live[1], live[3]};
  live.push_back(allocator->allocate(44_MiB));
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 0);
}

TEST_F(small_device, names_the_host_tier_when_the_device_is_simply_full) {
  make("");
  live.push_back(allocator->allocate(60_MiB));
  const std::string said = refusal([&] { (void)allocator->allocate(10_MiB); });
  EXPECT_TRUE(says(said, "use a pool whose tiers include the host")) << said;
}

TEST_F(small_device, tells_what_is_held_outside_the_allocator) {
  make("");
  caching_allocator other(on, device_id{0});
  void* const elsewhere = other.allocate(40_MiB);
  live.push_back(allocator->allocate(4_MiB));
  const std::string said = refusal([&] { (void)allocator->allocate(30_MiB); });
  EXPECT_TRUE(says(said, "this allocator holds 4.0 MiB")) << said;
  EXPECT_TRUE(says(said, "outside this allocator: 40.0 MiB")) << said;
  other.free(elsewhere);
}

TEST_F(small_device, names_both_tiers_when_both_are_full) {
  make("");
  const pool_id pool = allocator->create_pool({.tiers = {tier::device, tier::host}});
  allocator->begin_allocate_to_pool(pool);
  live.push_back(allocator->allocate(60_MiB));
  live.push_back(allocator->allocate(60_MiB));
  const std::string said = refusal([&] { (void)allocator->allocate(10_MiB); });
  allocator->end_allocate_to_pool(pool);
  EXPECT_TRUE(says(said, "both tiers are full")) << said;
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 2) << "one a request, not one a tier";
  EXPECT_TRUE(says(said, "pool 1")) << said;
}

TEST_F(small_device, says_what_the_host_tier_has_where_it_was_asked) {
  make("");
  const auto said_of = [&](const pool_options& options, std::size_t bytes) {
    const pool_id pool = allocator->create_pool(options);
    allocator->begin_allocate_to_pool(pool);
    const std::string said = refusal([&] { (void)allocator->allocate(bytes); });
    allocator->end_allocate_to_pool(pool);
    allocator->release_pool(pool);
    return said;
  };
  const std::string host = said_of({.tiers = {tier::host}}, 100_MiB);
  EXPECT_TRUE(says(host, "host memory: 64.0 MiB of 64.0 MiB are free, this allocator holds 0 B"))
      << host;
  EXPECT_TRUE(says(host, "help: use less memory: the host tier is full")) << host;
  allocator->set_memory_fraction(0.25);
  const std::string limited = said_of({.tiers = {tier::host}}, 100_MiB);
  EXPECT_TRUE(says(limited, "help: use less memory: the host tier is full")) << limited;
  allocator->set_memory_fraction(1);
  const std::string both = said_of({.tiers = {tier::device, tier::host}}, 100_MiB);
  EXPECT_TRUE(says(both, "help: set the pool's may_span")) << both;
}

TEST_F(small_device, one_block_may_lie_in_both_tiers) {
  make("");
  const pool_id pool =
      allocator->create_pool({.tiers = {tier::device, tier::host}, .may_span = true});
  allocator->begin_allocate_to_pool(pool);
  live.push_back(allocator->allocate(100_MiB));  // more than 9/8 of the device
  allocator->end_allocate_to_pool(pool);
  const memory_report now = allocator->report();
  EXPECT_EQ(now.reserved_bytes + now.host_tier_bytes, 100_MiB);
  EXPECT_GE(now.reserved_bytes, 48_MiB);
  on->fill(at(live.back()), std::byte{7}, 100_MiB, nullptr);
  on->synchronize(native_stream{});
  EXPECT_EQ(static_cast<const std::byte*>(live.back())[100_MiB - 1], std::byte{7});
}

TEST_F(small_device, a_block_in_both_tiers_takes_what_the_fraction_leaves_it) {
  make("per_process_memory_fraction:0.5");
  const pool_id pool =
      allocator->create_pool({.tiers = {tier::device, tier::host}, .may_span = true});
  allocator->begin_allocate_to_pool(pool);
  live.push_back(allocator->allocate(90_MiB));  // more than either tier may give
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(allocator->report().reserved_bytes, 32_MiB);
  EXPECT_EQ(allocator->report().host_tier_bytes, 58_MiB);
  EXPECT_EQ(allocator->statistics().num_ooms, 0);
}

TEST_F(small_device, a_block_lies_in_one_tier_unless_it_may_span) {
  make("");
  const pool_id pool = allocator->create_pool({.tiers = {tier::device, tier::host}});
  allocator->begin_allocate_to_pool(pool);
  for (int round = 0; round < 3; ++round) {
    for (const std::size_t bytes : {30_MiB, 50_MiB, 20_MiB})
      live.push_back(allocator->allocate(bytes));
    for (const segment_snapshot& run : allocator->snapshot(pool).segments) {
      EXPECT_LE(run.total_bytes, 64_MiB) << "a run over both tiers";
    }
    for (void* each : live) allocator->free(each);
    live.clear();
  }
  allocator->end_allocate_to_pool(pool);
}

TEST_F(small_device, names_pools_that_keep_memory) {
  make("");
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  allocator->begin_capture(pool);
  allocator->free(allocator->allocate(40_MiB));
  allocator->end_capture(pool);
  allocator->end_allocate_to_pool(pool);
  const std::string said = refusal([&] { (void)allocator->allocate(30_MiB); });
  EXPECT_TRUE(says(said, "40.0 MiB are cached in other pools")) << said;
  EXPECT_TRUE(says(said, "help: release pools")) << said;
  allocator->release_pool(pool);
  live.push_back(allocator->allocate(30_MiB));
}

TEST_F(small_device, names_no_option_that_the_default_pool_has_not) {
  make("expandable_segments:False");
  scatter();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  const std::string said = refusal([&] { (void)allocator->allocate(30_MiB); });
  allocator->end_allocate_to_pool(pool);
  EXPECT_TRUE(says(said, "are cached in other pools")) << said;
  EXPECT_FALSE(says(said, "use_on_oom") || says(said, "release pools")) << said;
}

TEST_F(small_device, names_the_fraction_where_a_segment_would_pass_it) {
  make("expandable_segments:False,per_process_memory_fraction:0.5");
  live.push_back(allocator->allocate(15_MiB));
  const std::string said = refusal([&] { (void)allocator->allocate(3_MiB); });  // of 20 MiB
  EXPECT_TRUE(says(said, "help: raise per_process_memory_fraction")) << said;
}

TEST_F(small_device, names_the_pools_own_option_where_that_is_in_the_way) {
  make("");
  const pool_id pool = allocator->create_pool({.expandable_segments = false});
  allocator->begin_allocate_to_pool(pool);
  scatter();
  const std::string said = refusal([&] { (void)allocator->allocate(30_MiB); });
  allocator->end_allocate_to_pool(pool);
  EXPECT_TRUE(says(said, "help: let the pool's segments expand")) << said;
}

/// Another process holds most of the device.
class crowded_driver final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  std::vector<process_usage> processes(device_id) const override {
    return {{.pid = 1, .bytes = 60_MiB, .this_process = false}};
  }
};

TEST(allocator_help, stopping_others_on_the_device_is_none_for_the_host_tier) {
  const auto on = std::make_shared<crowded_driver>(
      host_driver::make({.devices = 1, .device_bytes = 64_MiB, .host_bytes = 16_MiB}));
  caching_allocator allocator(on, device_id{0});
  allocator.begin_allocate_to_pool(allocator.create_pool({.tiers = {tier::host}}));
  const std::string said = refusal([&] { (void)allocator.allocate(32_MiB); });
  EXPECT_TRUE(says(said, "help: use less memory: the host tier is full")) << said;
}

TEST_F(small_device, retries_that_succeed_are_not_logged) {
  const native_stream other = on->create_stream(device_id{0});
  make("expandable_segments:False");
  ::testing::internal::CaptureStderr();
  for (const std::size_t mib : {20u, 30u, 40u, 50u, 60u}) {
    allocator->free(allocator->allocate(mib << 20, mib % 20 == 0 ? other : nullptr));
  }
  EXPECT_EQ(::testing::internal::GetCapturedStderr(), "");
  EXPECT_GE(allocator->statistics().num_alloc_retries, 3);
  EXPECT_EQ(allocator->statistics().num_ooms, 0);
  allocator.reset();
  on->destroy_stream(other);
}

TEST_F(small_device, works_on_after_running_out_many_times) {
  for (const char* const config : {"", "expandable_segments:False", "recycle_handles:wait"}) {
    make(config);
    const auto before = on->alive();
    for (int i = 0; i < 20; ++i) {
      std::vector<void*> all;
      try {
        for (;;) all.push_back(allocator->allocate(7_MiB));
      } catch (const out_of_memory&) {
      }
      EXPECT_GE(all.size(), 6u);
      for (void* each : all) allocator->free(each);
    }
    EXPECT_NO_THROW(allocator->check_invariants());
    allocator->empty_cache();
    EXPECT_EQ(on->alive().created_bytes, before.created_bytes);
  }
}

}  // namespace
}  // namespace evmm::test
