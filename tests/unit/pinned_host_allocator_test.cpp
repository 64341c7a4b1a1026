// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/pinned_allocator_fixture.hpp"

#include <evmm/allocator/pinned_host_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include <sys/sysinfo.h>

namespace evmm::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// --- sizes --------------------------------------------------------------------------------------

TEST_F(pinned_allocator, takes_what_was_asked_in_whole_pages) {
  const auto pinned = make();
  EXPECT_EQ(pinned->allocate(0), nullptr);
  pinned->free(nullptr);
  void* const first = pinned->allocate(20_MiB + 1);
  EXPECT_EQ(on->alive().pinned_bytes, 20_MiB + 4_KiB) << "no power of two";
  EXPECT_EQ(at(first) % 4096, 0u);
  void* const second = pinned->allocate(1);
  EXPECT_EQ(on->alive().pinned_bytes, 20_MiB + 8_KiB);
  std::memset(first, 1, 20_MiB + 1);
  const auto counted = pinned->statistics();
  EXPECT_EQ(counted.requested_bytes.current, static_cast<std::int64_t>(20_MiB + 2));
  EXPECT_EQ(counted.active_bytes.current, static_cast<std::int64_t>(20_MiB + 8_KiB));
  pinned->free(first);
  pinned->free(second);
  EXPECT_THROW(static_cast<void>(pinned->allocate(std::size_t{1} << 60)), invalid_argument);
}

TEST_F(pinned_allocator, rounds_to_a_power_of_two_up_to_the_threshold_only) {
  const auto pinned = make({.max_round_threshold = 1_MiB});
  static_cast<void>(pinned->allocate(600_KiB));
  EXPECT_EQ(on->alive().pinned_bytes, 1_MiB);
  static_cast<void>(pinned->allocate(1_MiB + 1));
  EXPECT_EQ(on->alive().pinned_bytes, 2_MiB + 4_KiB);
}

TEST_F(pinned_allocator, reuses_the_smallest_block_that_serves_and_splits_it) {
  const auto pinned = make();
  void* const large = pinned->allocate(8_MiB);
  void* const small = pinned->allocate(4_MiB);
  pinned->free(large);
  pinned->free(small);
  const auto held = on->alive().pinned_bytes;
  void* const first = pinned->allocate(3_MiB);
  EXPECT_EQ(first, small) << "best fit";
  void* const rest = pinned->allocate(1_MiB);
  EXPECT_EQ(at(rest), at(small) + 3_MiB) << "what was over";
  void* const second = pinned->allocate(2_MiB);
  EXPECT_EQ(second, large);
  void* const third = pinned->allocate(6_MiB);
  EXPECT_EQ(at(third), at(large) + 2_MiB);
  EXPECT_EQ(on->alive().pinned_bytes, held) << "nothing new was needed";
  for (void* each : {first, rest, second, third}) pinned->free(each);
  EXPECT_EQ(pinned->allocate(8_MiB), large) << "the parts have joined";
  pinned->free(large);
}

TEST_F(pinned_allocator, a_small_request_does_not_hold_a_large_segment) {
  const auto pinned = make();
  void* const large = pinned->allocate(8_MiB);
  pinned->free(large);
  void* const small = pinned->allocate(1_MiB);
  EXPECT_NE(small, large) << "less than a quarter";
  EXPECT_EQ(pinned->empty_cache(), 8_MiB);
  pinned->free(small);
}

// --- streams ------------------------------------------------------------------------------------

TEST_F(pinned_allocator, a_block_is_not_reused_before_its_streams_are_past_it) {
  const auto pinned = make();
  const auto stream = on->create_stream({0});
  const auto other = on->create_stream({0});
  {
    stream_gate gate(*on, stream);
    void* const first = pinned->allocate(1_MiB);
    EXPECT_TRUE(pinned->record(static_cast<char*>(first) + 5, stream)) << "anywhere in it";
    EXPECT_TRUE(pinned->record(first, other));
    EXPECT_TRUE(pinned->record(first, other)) << "once is enough";
    pinned->free(first);
    EXPECT_FALSE(pinned->owns(first));
    EXPECT_THROW(pinned->free(first), invalid_argument);
    EXPECT_FALSE(pinned->record(first, stream));
    on->synchronize(other);
    void* const second = pinned->allocate(1_MiB);
    EXPECT_NE(second, first);
    EXPECT_EQ(pinned->statistics().active_requests.current, 2);
    EXPECT_EQ(pinned->empty_cache(), 0u);

    void* const behind = pinned->allocate(2_MiB);  // another stream's blocks are not held up
    pinned->record(behind, other);
    pinned->free(behind);
    on->synchronize(other);
    EXPECT_EQ(pinned->allocate(2_MiB), behind);
    gate.open();
    on->synchronize(stream);
    EXPECT_EQ(pinned->allocate(1_MiB), first);
    for (void* each : {first, second, behind}) pinned->free(each);
  }
  EXPECT_EQ(on->alive().events, 2u) << "events are used again";
  on->destroy_stream(stream);
  on->destroy_stream(other);
}

TEST_F(pinned_allocator, streams_of_other_devices_are_named_with_their_device) {
  const auto pinned = make();
  const auto stream = on->create_stream({1});
  void* const first = pinned->allocate(1_MiB);
  pinned->record(first, stream, device_id{1});
  pinned->free(first);
  on->synchronize(stream);
  EXPECT_EQ(pinned->allocate(1_MiB), first);
  pinned->record(first, stream);
  EXPECT_THROW(pinned->free(first), invalid_argument) << "an event of device 0 on device 1";
  EXPECT_TRUE(pinned->owns(first)) << "a refused free changes nothing";
  on->destroy_stream(stream);
}

TEST_F(pinned_allocator, a_stream_of_no_device_is_refused_before_it_counts) {
  const auto pinned = make();
  void* const block = pinned->allocate(1_MiB);
  for (const int wrong : {-1, 2, 9}) {
    EXPECT_THROW(pinned->record(block, nullptr, device_id{wrong}), invalid_argument);
  }
  pinned->free(block);
  EXPECT_EQ(pinned->statistics().active_requests.current, 0);
}

TEST_F(pinned_allocator, the_one_name_of_many_streams_is_refused) {
  const auto pinned = make();
  void* const block = pinned->allocate(1_MiB);
  const auto per_thread = reinterpret_cast<native_stream>(std::uintptr_t{2});
  EXPECT_THROW(pinned->record(block, per_thread), unsupported);
  pinned->free(block);
  EXPECT_EQ(pinned->statistics().active_requests.current, 0);
}

TEST_F(pinned_allocator, a_captured_stream_is_busy_until_its_capture_has_ended) {
  const auto pinned = make();
  const auto stream = on->create_stream({0});
  void* const first = pinned->allocate(1_MiB);
  host->begin_capture(stream);
  pinned->record(first, stream);
  pinned->free(first);
  EXPECT_EQ(host->capture(stream).status, capture_status::active) << "it was not disturbed";
  void* const second = pinned->allocate(1_MiB);
  EXPECT_NE(second, first);
  EXPECT_EQ(host->capture(stream).status, capture_status::active);
  static_cast<void>(host->end_capture(stream));
  pinned->poll();  // records the event
  on->synchronize(stream);
  EXPECT_EQ(pinned->allocate(1_MiB), first);
  pinned->free(first);
  pinned->free(second);
  on->destroy_stream(stream);
}

TEST_F(pinned_allocator, a_thread_of_its_own_asks_when_told_to) {
  const auto pinned = make({.background_thread = true});
  const auto stream = on->create_stream({0});
  void* const first = pinned->allocate(1_MiB);
  pinned->record(first, stream);
  pinned->free(first);
  on->synchronize(stream);
  while (pinned->statistics().active_requests.current != 0) std::this_thread::yield();
  on->clear_record();
  EXPECT_EQ(pinned->allocate(1_MiB), first);
  const auto calls = on->record_of_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), driver_call::done), 0)
      << "the caller asks nothing";
  pinned->free(first);
  on->destroy_stream(stream);
}

// --- options ------------------------------------------------------------------------------------

TEST_F(pinned_allocator, blocks_above_a_size_are_given_back_when_they_are_free) {
  const auto pinned = make({.max_cached_size = 2_MiB});
  const auto stream = on->create_stream({0});
  void* const large = pinned->allocate(3_MiB);
  void* const small = pinned->allocate(2_MiB);
  void* const used = pinned->allocate(4_MiB);
  pinned->record(used, stream);
  {
    stream_gate gate(*on, stream);
    pinned->free(large);
    pinned->free(small);
    pinned->free(used);
    EXPECT_EQ(on->alive().pinned_bytes, 6_MiB);
  }
  on->synchronize(stream);
  pinned->poll();
  EXPECT_EQ(on->alive().pinned_bytes, 2_MiB);
  EXPECT_EQ(pinned->statistics().host_free.count, 2);
  on->destroy_stream(stream);
}

TEST_F(pinned_allocator, ordinary_pages_are_touched_and_registered) {
  const auto pinned = make({.use_host_register = true, .register_threads = 4});
  on->clear_record();
  void* const first = pinned->allocate(9_MiB + 5);
  const auto calls = on->record_of_calls();
  EXPECT_EQ(std::count(calls.begin(), calls.end(), driver_call::pin), 1);
  EXPECT_EQ(std::count(calls.begin(), calls.end(), driver_call::allocate_pinned), 0);
  std::memset(first, 3, 9_MiB + 5);
  pinned->free(first);
  EXPECT_EQ(pinned->allocate(9_MiB), first);
  pinned->free(first);
  EXPECT_EQ(pinned->empty_cache(), 9_MiB + 4_KiB);
  EXPECT_EQ(on->alive().pinned, 0u);
  for (const unsigned wrong : {0U, 3U, 256U}) {
    EXPECT_THROW(make({.register_threads = wrong}), invalid_argument);
  }
}

TEST_F(pinned_allocator, more_ordinary_pages_than_the_machine_has_are_refused_untouched) {
  struct sysinfo machine {};
  ASSERT_EQ(::sysinfo(&machine), 0);
  const std::size_t physical = machine.totalram * machine.mem_unit;
  const auto pinned = make({.use_host_register = true});
  try {
    static_cast<void>(pinned->allocate(physical + 1_GiB));
    FAIL() << "there is no such memory";
  } catch (const out_of_memory& failure) {
    EXPECT_THAT(failure.what(), HasSubstr("of host memory are free"));
  }
  pinned->free(pinned->allocate(1_MiB));
}

TEST_F(pinned_allocator, small_requests_come_from_the_reserve_segment) {
  const auto pinned = make({.reserve_segment = 2_MiB});
  EXPECT_EQ(on->alive().pinned, 0u) << "not before the first use";
  std::vector<void*> small;
  for (int i = 0; i < 100; ++i) small.push_back(pinned->allocate(1000));
  EXPECT_EQ(on->alive().pinned_bytes, 2_MiB);
  EXPECT_EQ(at(small[1]) - at(small[0]), 1024u) << "multiples of 512";
  void* const large = pinned->allocate(3_MiB);
  void* const last = pinned->allocate(1_MiB);
  void* const full = pinned->allocate(1_MiB);
  EXPECT_EQ(on->alive().pinned_bytes, 6_MiB) << "what does not fit is made";
  for (void* each : small) pinned->free(each);
  for (void* each : {large, last, full}) pinned->free(each);
  EXPECT_EQ(pinned->empty_cache(), 4_MiB);
  EXPECT_EQ(on->alive().pinned_bytes, 2_MiB) << "the reserve stays";
  EXPECT_EQ(pinned->allocate(1000), small[0]);
  pinned->free(small[0]);
}

TEST_F(pinned_allocator, memory_goes_to_the_nodes_that_are_asked_for) {
  using policy = host_placement::policy;
  for (const bool registered : {false, true}) {
    const auto pinned = make({.use_host_register = registered,
                              .placement = {.how = policy::bind, .nodes = {numa_node{0}}}});
    void* const first = pinned->allocate(1_MiB);
    std::memset(first, 1, 1_MiB);
    pinned->free(first);
    const auto elsewhere = make({.use_host_register = registered,
                                 .placement = {.how = policy::bind, .nodes = {numa_node{77}}}});
    EXPECT_THROW(static_cast<void>(elsewhere->allocate(1_MiB)), invalid_argument);
  }
}

// --- running out --------------------------------------------------------------------------------

TEST_F(pinned_allocator, cached_memory_makes_room_and_then_an_error_says_what_is_held) {
  const auto pinned = make();
  void* const first = pinned->allocate(40_MiB);
  pinned->free(first);
  void* const second = pinned->allocate(64_MiB);
  EXPECT_EQ(pinned->statistics().num_retries, 1);
  try {
    static_cast<void>(pinned->allocate(1_MiB + 1));
    FAIL() << "there is no more";
  } catch (const out_of_memory& failure) {
    EXPECT_THAT(failure.what(), AllOf(HasSubstr("cannot pin 1.0 MiB"), HasSubstr("DEVICE 0"),
                                      HasSubstr("holds 64.0 MiB in 1 pieces"),
                                      HasSubstr("0 B free"), HasSubstr("EVMM_HOST_BYTES")));
  }
  EXPECT_EQ(pinned->statistics().num_ooms, 1);
  pinned->free(second);
  void* const third = pinned->allocate(1_MiB + 1);
  pinned->free(third);
}

TEST_F(pinned_allocator, when_memory_is_out_any_free_block_serves) {
  const auto pinned = make();
  void* const first = pinned->allocate(32_MiB);
  void* const second = pinned->allocate(32_MiB);
  pinned->free(first);
  void* const part = pinned->allocate(16_MiB);  // so that the segment cannot be given back
  EXPECT_EQ(part, first);
  void* const small = pinned->allocate(4_KiB);
  EXPECT_EQ(at(small), at(first) + 16_MiB);
  for (void* each : {second, part, small}) pinned->free(each);
}

TEST_F(pinned_allocator, when_memory_is_out_it_waits_for_streams) {
  const auto pinned = make();
  const auto stream = on->create_stream({0});
  void* const first = pinned->allocate(60_MiB);
  pinned->record(first, stream);
  std::atomic<bool> open = false;
  on->launch(stream, [&] { open.wait(false); });
  pinned->free(first);
  std::thread opener([&] {
    // Only once the allocator stands and waits for the event.
    const auto waits = [&] {
      const auto calls = on->record_of_calls();
      return std::count(calls.begin(), calls.end(), driver_call::allocate_pinned) >= 2;
    };
    while (!waits()) std::this_thread::yield();
    open = true;
    open.notify_all();
  });
  void* const second = pinned->allocate(60_MiB);
  opener.join();
  EXPECT_EQ(second, first);
  pinned->free(second);
  on->destroy_stream(stream);
}

TEST_F(pinned_allocator, rounding_that_is_too_much_is_named) {
  const auto pinned = make({.max_round_threshold = 1_GiB});
  try {
    static_cast<void>(pinned->allocate(40_MiB));
    static_cast<void>(pinned->allocate(40_MiB));
    FAIL() << "64 MiB each";
  } catch (const out_of_memory& failure) {
    EXPECT_THAT(failure.help(), HasSubstr("pinned_max_round_threshold_mb"));
  }
}

// --- what is counted ----------------------------------------------------------------------------

TEST_F(pinned_allocator, counts_as_pytorch_does) {
  const auto pinned = make();
  const auto stream = on->create_stream({0});
  void* const first = pinned->allocate(1_MiB - 100);
  void* const second = pinned->allocate(3_MiB);
  pinned->record(first, stream);
  {
    stream_gate gate(*on, stream);
    pinned->free(first);
    pinned->free(second);
    const auto waiting = pinned->statistics();
    EXPECT_EQ(waiting.active_requests.current, 1) << "one waits for its stream";
    EXPECT_EQ(waiting.requested_bytes.current, 0);
    EXPECT_EQ(waiting.active_bytes.peak, static_cast<std::int64_t>(4_MiB));
  }
  on->synchronize(stream);
  pinned->poll();
  auto counted = pinned->statistics();
  EXPECT_EQ(counted.active_requests,
            (statistic{.current = 0, .peak = 2, .allocated = 2, .freed = 2}));
  EXPECT_EQ(counted.allocations.current, 2);
  EXPECT_EQ(counted.allocated_bytes.current, static_cast<std::int64_t>(4_MiB));
  EXPECT_EQ(counted.host_alloc.count, 2);
  EXPECT_LE(counted.host_alloc.min_us, counted.host_alloc.average_us());
  EXPECT_GE(counted.host_alloc.max_us, counted.host_alloc.average_us());
  EXPECT_EQ(counted.buckets[20].host_alloc.count, 1) << "up to 1 MiB";
  EXPECT_EQ(counted.buckets[22].host_alloc.count, 1) << "above 2 MiB, up to 4";
  EXPECT_EQ(counted.buckets[20].active_requests.peak, 1);
  pinned->reset_peaks();
  pinned->reset_totals();
  counted = pinned->statistics();
  EXPECT_EQ(counted.active_requests, statistic{});
  EXPECT_EQ(counted.allocations, (statistic{.current = 2, .peak = 2}));
  EXPECT_EQ(counted.host_alloc, call_times{});
  EXPECT_EQ(pinned->empty_cache(), 4_MiB);
  EXPECT_EQ(pinned->statistics().host_free.count, 2);
  EXPECT_EQ(pinned->statistics().allocations.current, 0);
  on->destroy_stream(stream);
}

}  // namespace
}  // namespace evmm::test
