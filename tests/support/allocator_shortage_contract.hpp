// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"

#include <cmath>
#include <future>
#include <stdexcept>
#include <utility>

// What is tried, in order, before a request fails, each step by itself; and how it fails.

namespace evmm::test {

class allocator_shortage_contract : public allocator_contract {
 protected:
  /// Whether a free block of the default stream lies here.
  bool cached(void* where) {
    void* const found = allocator->allocate_at(where, 2_MiB);
    allocator->free(found);
    return found != nullptr;
  }
  std::size_t held_by(native_stream stream) const {
    std::size_t bytes = 0;
    for (const segment_snapshot& each : allocator->snapshot({}, false).segments) {
      if (each.stream == stream) bytes += each.total_bytes;
    }
    return bytes;
  }
  /// A pool that helps out, with 20 MiB of the default stream cached.
  struct helper {
    pool_id pool;
    void* cached;
  };
  helper make_helper() {
    const pool_id pool = allocator->create_pool({.use_on_oom = true});
    allocator->begin_allocate_to_pool(pool);
    void* const cached = allocator->allocate(20_MiB);
    allocator->free(cached);
    allocator->end_allocate_to_pool(pool);
    return {pool, cached};
  }
};

TEST_P(allocator_shortage_contract, whoever_offers_may_free_something) {
  make(k_segments);
  allow(20_MiB);
  void* held = allocator->allocate(20_MiB);
  int asked = 0;
  const auto offer = allocator->on_shortage([&] {
    ++asked;
    if (held == nullptr) return false;
    allocator->free(std::exchange(held, nullptr));
    return true;
  });
  void* const served = allocator->allocate(18_MiB);
  EXPECT_EQ(asked, 1);
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 0);
  allocator->free(served);
}

TEST_P(allocator_shortage_contract, offers_are_asked_with_no_lock_held) {
  make();
  const auto offer = allocator->on_shortage([&] {
    std::async(std::launch::async, [&] { (void)allocator->statistics(); }).get();
    return false;
  });
  free({allocator->allocate(3_MiB)});
}

TEST_P(allocator_shortage_contract, an_offer_may_end_the_pool_that_is_asked) {
  make();
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  allocator->release_pool(pool);
  auto offer = allocator->on_shortage([&] {
    allocator->end_allocate_to_pool(pool);
    allocator->empty_cache();
    return false;
  });
  EXPECT_TRUE(says(refusal([&] { (void)allocator->allocate(3_MiB); }), "no pool 1"));
  offer.reset();
  EXPECT_EQ(reserved(), 0);
  free({allocator->allocate(3_MiB)});
}

TEST_P(allocator_shortage_contract, an_offer_that_throws_fails_the_request_alone) {
  make();
  auto offer = allocator->on_shortage([]() -> bool { throw std::runtime_error("offer"); });
  EXPECT_THROW((void)allocator->allocate(3_MiB), std::runtime_error);
  offer.reset();
  free({allocator->allocate(3_MiB)});
}

TEST_P(allocator_shortage_contract, an_offer_that_is_short_of_memory_itself_is_not_asked_again) {
  make();
  allow(20_MiB);
  int asked = 0;
  const auto offer = allocator->on_shortage([&] {
    ++asked;
    EXPECT_THROW((void)allocator->allocate(30_MiB), out_of_memory);
    return false;
  });
  EXPECT_THROW((void)allocator->allocate(40_MiB), out_of_memory);
  EXPECT_EQ(asked, 1);
  EXPECT_THROW((void)allocator->allocate(40_MiB), out_of_memory);
  EXPECT_EQ(asked, 2);
}

TEST_P(allocator_shortage_contract, an_offer_that_ended_is_not_asked) {
  make();
  int asked = 0;
  auto offer = allocator->on_shortage([&] { return ++asked > 100; });
  free({allocator->allocate(3_MiB)});
  EXPECT_EQ(asked, 1);
  offer.reset();
  free({allocator->allocate(30_MiB)});
  EXPECT_EQ(asked, 1);
}

TEST_P(allocator_shortage_contract, garbage_is_collected_from_the_oldest_on) {
  make(k_segments);
  allow(160_MiB);
  const auto all = allocate(4, 20_MiB);
  std::vector<void*> later;
  for (const std::size_t i : {2u, 0u, 1u}) {
    allocator->free(all[i]);
    later.push_back(allocator->allocate(512, new_stream()));  // time goes by
  }
  allocator->configure("garbage_collection_threshold:0.5");
  later.push_back(allocator->allocate(512, new_stream()));
  EXPECT_FALSE(cached(all[2])) << "freed first";
  EXPECT_TRUE(cached(all[0]) && cached(all[1])) << "6 MiB were too much";
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 0);
  later.push_back(all[3]);
  free(later);
}

TEST_P(allocator_shortage_contract, garbage_is_collected_only_above_the_threshold) {
  make("expandable_segments:False,garbage_collection_threshold:0.5");
  allow(160_MiB);
  free(allocate(3, 20_MiB));
  void* const next = allocator->allocate(30_MiB);
  EXPECT_EQ(allocator->statistics().num_device_free, 0) << "60 of 80 MiB";
  allocator->free(next);
}

TEST_P(allocator_shortage_contract, garbage_of_small_expandable_and_private_pools_counts) {
  const auto collected_of = [&](const char* config, std::size_t bytes, bool in_pool) {
    make(config);
    allow(40_MiB);
    const pool_id pool = allocator->create_pool();
    if (in_pool) allocator->begin_allocate_to_pool(pool);
    free(allocate(16_MiB / bytes, bytes));
    if (in_pool) allocator->end_allocate_to_pool(pool);
    allocator->configure("garbage_collection_threshold:0.25");
    void* const next = allocator->allocate(512, new_stream());
    allocator->free(next);
    return allocator->statistics().reserved_bytes.all.freed;
  };
  EXPECT_GE(collected_of(k_segments, 1_MiB, false), 5 << 20);
  EXPECT_GE(collected_of("recycle_handles:never", 1_MiB, false), 5 << 20);
  EXPECT_GE(collected_of("recycle_handles:never", 16_MiB, false), 5 << 20);
  EXPECT_GE(collected_of(k_segments, 16_MiB, true), 5 << 20);
  EXPECT_GE(collected_of("recycle_handles:never", 16_MiB, true), 5 << 20);
}

TEST_P(allocator_shortage_contract, pools_that_help_out_serve_the_default_pool) {
  make(k_segments);
  allow(20_MiB);
  const helper with = make_helper();
  void* const block = allocator->allocate(15_MiB);
  EXPECT_EQ(block, with.cached);
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 0);
  EXPECT_TRUE(allocator->live_allocations_are(with.pool, {block}));
  allocator->free(block);
}

TEST_P(allocator_shortage_contract, pools_that_do_not_help_out_give_their_memory_back) {
  make(k_segments);
  allow(20_MiB);
  const pool_id pool = allocator->create_pool();
  allocator->begin_allocate_to_pool(pool);
  free({allocator->allocate(20_MiB)});
  allocator->end_allocate_to_pool(pool);
  void* const block = allocator->allocate(15_MiB);
  EXPECT_TRUE(allocator->live_allocations_are(pool, {}));
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 1);
  allocator->free(block);
}

TEST_P(allocator_shortage_contract, cached_memory_of_idle_streams_goes_first) {
  make(k_segments);
  allow(60_MiB);
  const native_stream busy = new_stream();
  const native_stream idle = new_stream();
  const native_stream needy = new_stream();
  void* const of_busy = allocator->allocate(20_MiB, busy);
  void* const of_idle = allocator->allocate(40_MiB, idle);
  free({of_busy, of_idle});
  const stream_gate gate(*on, busy);  // to wait for it would be for ever
  void* const block = allocator->allocate(40_MiB, needy);
  EXPECT_EQ(held_by(busy), 20_MiB);
  EXPECT_EQ(held_by(idle), 0u);
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 1);
  allocator->free(block);
}

TEST_P(allocator_shortage_contract, memory_of_one_tier_is_not_given_back_for_the_other) {
  for (const char* const config : {"garbage_collection_threshold:0.3",
                                   "garbage_collection_threshold:0.3,expandable_segments:False"}) {
    make(config);
    allow(40_MiB);
    const pool_id host = allocator->create_pool({.tiers = {tier::host}});
    allocator->begin_allocate_to_pool(host);
    free({allocator->allocate(20_MiB)});
    allocator->end_allocate_to_pool(host);
    const std::size_t cached = allocator->report().host_tier_bytes;
    free({allocator->allocate(30_MiB, new_stream())});
    free({allocator->allocate(12_MiB)});
    void* const live = allocator->allocate(30_MiB);
    const std::string said = refusal([&] { (void)allocator->allocate(20_MiB); });
    EXPECT_FALSE(says(said, "in other pools")) << said;
    EXPECT_EQ(allocator->report().host_tier_bytes, cached) << config;
    allocator->free(live);
  }
}

TEST_P(allocator_shortage_contract, only_as_much_is_given_back_as_the_request_needs) {
  make(k_segments);
  allow(80_MiB);
  const native_stream other = new_stream();
  free(allocate(4, 20_MiB, other));
  void* const block = allocator->allocate(20_MiB);
  EXPECT_EQ(allocator->statistics().num_device_free, 1);
  allocator->free(block);
}

TEST_P(allocator_shortage_contract, memory_is_tried_again_after_the_driver_refused_once) {
  for (const char* const config : {"", k_segments}) {
    for (const driver_call kind :
         {driver_call::create, driver_call::map, driver_call::set_access}) {
      make(config);
      free({allocator->allocate(12_MiB, new_stream())});
      on->fail_call(kind, 0, error_category::out_of_memory);
      ::testing::internal::CaptureStderr();
      void* const block = allocator->allocate(32_MiB);
      EXPECT_EQ(::testing::internal::GetCapturedStderr(), "") << "what was cured is not told";
      EXPECT_TRUE(on->disarm());
      EXPECT_NE(block, nullptr);
      EXPECT_EQ(allocator->statistics().num_ooms, 0);
      allocator->check_invariants();
      allocator->free(block);
    }
  }
}

TEST_P(allocator_shortage_contract, the_host_tier_follows_the_device) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    allow(20_MiB);
    const pool_id pool = allocator->create_pool({.tiers = {tier::device, tier::host}});
    allocator->begin_allocate_to_pool(pool);
    void* const first = allocator->allocate(18_MiB);
    void* const second = allocator->allocate(18_MiB);
    allocator->end_allocate_to_pool(pool);
    write(second, 18_MiB, 4);
    EXPECT_TRUE(holds(second, 18_MiB, 4));
    EXPECT_GE(allocator->report().host_tier_bytes, 16_MiB);
    EXPECT_LE(allocator->report().reserved_bytes, 20_MiB);
    EXPECT_EQ(allocator->statistics().num_ooms, 0);
    EXPECT_EQ(allocator->statistics().num_alloc_retries, 1);
    free({first, second});
    allocator->empty_cache();
    EXPECT_EQ(allocator->report().host_tier_bytes, 0u);
  }
}

TEST_P(allocator_shortage_contract, out_of_memory_says_what_was_asked_and_why_it_fails) {
  make(k_segments);
  allow(60_MiB);
  const auto all = allocate(12, 5_MiB);
  std::vector<void*> live;
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i % 4 == 0) {
      live.push_back(all[i]);
    } else {
      allocator->free(all[i]);
    }
  }
  const std::string said = refusal([&] { (void)allocator->allocate(30_MiB - 100); });
  EXPECT_TRUE(says(said, "out_of_memory: cannot allocate 30.0 MiB")) << said;
  EXPECT_TRUE(says(said, "holds 60.0 MiB of the 60.5 MiB it may hold")) << said;
  EXPECT_TRUE(says(said, "15.0 MiB are allocated")) << said;
  EXPECT_TRUE(says(said, "pool 0, large blocks")) << said;
  EXPECT_TRUE(says(said, "the largest free block has 15.0 MiB")) << said;
  EXPECT_TRUE(says(said, "45.0 MiB are free in pieces")) << said;
  EXPECT_TRUE(says(said, "45.0 MiB of them pinned")) << said;
  EXPECT_TRUE(says(said, "help: raise per_process_memory_fraction")) << said;
  EXPECT_EQ(allocator->statistics().num_ooms, 1);
  void* const fits = allocator->allocate(15_MiB);
  EXPECT_NE(fits, nullptr) << "it works on";
  live.push_back(fits);
  free(live);
}

TEST_P(allocator_shortage_contract, observers_are_told_with_no_lock_held) {
  make();
  allow(20_MiB);
  std::vector<oom_report> told;
  const auto observer = allocator->on_out_of_memory([&](const oom_report& report) {
    told.push_back(report);
    // Another thread gets memory meanwhile; it would wait for a lock that this one held.
    std::async(std::launch::async, [&] {
      allocator->free(allocator->allocate(2_MiB));
      (void)allocator->statistics();
      (void)allocator->snapshot();
      allocator->empty_cache();
    }).get();
  });
  EXPECT_THROW((void)allocator->allocate(64_MiB), out_of_memory);
  ASSERT_EQ(told.size(), 1u);
  EXPECT_EQ(told[0].requested_bytes, 64_MiB);
  EXPECT_NEAR(static_cast<double>(told[0].allowed_bytes), 20.5 * (1 << 20), 4096);
  EXPECT_EQ(told[0].total_bytes, on->usage(memory_location::on(device_id{0})).total_bytes);
  EXPECT_FALSE(told[0].rejected);
}

TEST_P(allocator_shortage_contract, an_observer_that_throws_or_ended_changes_nothing) {
  make();
  allow(20_MiB);
  int told = 0;
  auto ended = allocator->on_out_of_memory([&](const oom_report&) { ++told; });
  const auto throws =
      allocator->on_out_of_memory([](const oom_report&) { throw std::runtime_error("observer"); });
  ended.reset();
  ::testing::internal::CaptureStderr();
  EXPECT_THROW((void)allocator->allocate(64_MiB), out_of_memory);
  EXPECT_TRUE(says(::testing::internal::GetCapturedStderr(), "observer"));
  EXPECT_EQ(told, 0);
}

TEST_P(allocator_shortage_contract, throw_on_oom_refuses_before_anything_is_given_back) {
  make("throw_on_cudamalloc_oom:True,expandable_segments:False");
  allow(40_MiB);
  bool rejected = false;
  const auto observer =
      allocator->on_out_of_memory([&](const oom_report& report) { rejected = report.rejected; });
  const native_stream other = new_stream();
  free({allocator->allocate(30_MiB, other)});
  on->clear_record();
  const std::string said = refusal([&] { (void)allocator->allocate(20_MiB); });
  EXPECT_TRUE(says(said, "throw_on_cudamalloc_oom")) << said;
  EXPECT_TRUE(rejected);
  const auto now = allocator->statistics();
  EXPECT_EQ(now.num_oom_rejections, 1);
  EXPECT_EQ(now.num_ooms, 1);
  EXPECT_EQ(now.num_alloc_retries, 0);
  for (const driver_call each : on->record_of_calls()) EXPECT_NE(each, driver_call::create);
  void* const cached = allocator->allocate(30_MiB, other);
  EXPECT_NE(cached, nullptr) << "what is cached serves still";
  EXPECT_EQ(now.reserved_bytes.all.current, 30 << 20);
  allocator->free(cached);
}

TEST_P(allocator_shortage_contract, throw_on_oom_counts_the_whole_segment) {
  make("throw_on_cudamalloc_oom:True,expandable_segments:False");
  allow(16_MiB);
  on->clear_record();
  const std::string said = refusal([&] { (void)allocator->allocate(5_MiB); });  // of 20 MiB
  EXPECT_TRUE(says(said, "throw_on_cudamalloc_oom")) << said;
  EXPECT_EQ(allocator->statistics().num_oom_rejections, 1);
  EXPECT_EQ(allocator->statistics().num_alloc_retries, 0);
  for (const driver_call each : on->record_of_calls()) EXPECT_NE(each, driver_call::create);
}

TEST_P(allocator_shortage_contract, throw_on_oom_lets_pools_help_out) {
  make("throw_on_cudamalloc_oom:True,expandable_segments:False");
  allow(20_MiB);
  const helper with = make_helper();
  void* const block = allocator->allocate(15_MiB);
  EXPECT_EQ(block, with.cached);
  EXPECT_TRUE(allocator->live_allocations_are(with.pool, {block}));
  EXPECT_EQ(allocator->statistics().num_oom_rejections, 0);
  allocator->free(block);
}

TEST_P(allocator_shortage_contract, throw_on_oom_lets_held_memory_move) {
  make("throw_on_cudamalloc_oom:True");
  allow(64_MiB);
  const auto all = allocate(4, 16_MiB);
  free({all[0], all[2]});
  void* const moved = allocator->allocate(32_MiB);
  EXPECT_EQ(allocator->statistics().num_oom_rejections, 0) << "no new memory is needed";
  free({all[1], all[3], moved});
}

TEST_P(allocator_shortage_contract, throw_on_oom_leaves_the_host_tier_to_pools_that_have_it) {
  make("throw_on_cudamalloc_oom:True");
  allow(16_MiB);
  const pool_id pool = allocator->create_pool({.tiers = {tier::device, tier::host}});
  allocator->begin_allocate_to_pool(pool);
  void* const block = allocator->allocate(32_MiB);
  allocator->end_allocate_to_pool(pool);
  EXPECT_EQ(allocator->report().host_tier_bytes, 32_MiB);
  allocator->free(block);
}

TEST_P(allocator_shortage_contract, a_limit_below_what_is_held_stops_growth_alone) {
  make();
  void* const block = allocator->allocate(32_MiB);
  allow(8_MiB);
  EXPECT_TRUE(says(refusal([&] { (void)allocator->allocate(2_MiB, new_stream()); }),
                   "per_process_memory_fraction"));
  allocator->free(block);
  void* const again = allocator->allocate(32_MiB);
  EXPECT_EQ(again, block) << "what is held serves";
  allocator->free(again);
  allocator->set_memory_fraction(1);
  free({allocator->allocate(2_MiB, new_stream())});
}

TEST_P(allocator_shortage_contract, the_fraction_is_between_0_and_1) {
  make();
  for (const double wrong : {-0.1, 1.5, std::nan("")}) {
    EXPECT_TRUE(says(refusal([&] { allocator->set_memory_fraction(wrong); }), "[0, 1]"));
  }
  EXPECT_EQ(allocator->memory_fraction(), 1);
  allocator->set_memory_fraction(0.25);
  EXPECT_EQ(allocator->memory_fraction(), 0.25);
  EXPECT_EQ(allocator->options().per_process_memory_fraction, 0.25);
}

}  // namespace evmm::test
