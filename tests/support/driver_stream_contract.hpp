// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_contract.hpp"

#include <algorithm>
#include <atomic>
#include <future>
#include <stdexcept>
#include <thread>
#include <utility>

// Streams, events and work.

namespace evmm::test {

using driver_stream_contract = driver_contract;

TEST_P(driver_stream_contract, runs_work_in_order_on_another_thread) {
  const scoped_stream stream(*on);
  std::vector<int> order;
  std::thread::id runner;
  for (int i = 0; i < 100; ++i) {
    on->launch(stream, [&, i] {
      order.push_back(i);
      runner = std::this_thread::get_id();
    });
  }
  on->synchronize(stream);
  ASSERT_EQ(order.size(), 100u);
  EXPECT_TRUE(std::is_sorted(order.begin(), order.end()));
  EXPECT_NE(runner, std::this_thread::get_id());
}

TEST_P(driver_stream_contract, is_idle_when_all_work_is_done) {
  const scoped_stream stream(*on);
  EXPECT_TRUE(on->idle(stream));
  stream_gate gate(*on, stream);
  gate.wait_reached();
  EXPECT_FALSE(on->idle(stream));
  gate.open();
  on->synchronize(stream);
  EXPECT_TRUE(on->idle(stream));
}

TEST_P(driver_stream_contract, streams_do_not_wait_for_each_other) {
  const scoped_stream held(*on);
  const scoped_stream free(*on);
  const auto memory = make(device, granule);
  stream_gate gate(*on, held);
  on->fill(memory.base(), std::byte{1}, granule, free);  // CUDA may hold back functions, not this
  on->synchronize(free);
  EXPECT_FALSE(on->idle(held));
}

TEST_P(driver_stream_contract, an_event_is_done_when_the_work_before_its_record_is) {
  const scoped_stream stream(*on);
  const scoped_event event(*on);
  EXPECT_TRUE(on->done(event)) << "never recorded";
  on->synchronize(event);
  stream_gate gate(*on, stream);
  std::atomic<bool> ran = false;
  on->launch(stream, [&] { ran = true; });
  on->record(event, stream);
  stream_gate behind(*on, stream);
  EXPECT_FALSE(on->done(event));
  gate.open();
  on->synchronize(event);
  EXPECT_TRUE(ran);
  EXPECT_TRUE(on->done(event)) << "what was enqueued after the record does not count";
  EXPECT_FALSE(on->idle(stream));
}

TEST_P(driver_stream_contract, the_latest_record_counts) {
  const scoped_stream held(*on);
  const scoped_stream free(*on);
  const scoped_event event(*on);
  stream_gate gate(*on, held);
  on->record(event, held);
  EXPECT_FALSE(on->done(event));
  on->record(event, free);
  on->synchronize(event);  // would never return for the old record
  EXPECT_TRUE(on->done(event));
  on->record(event, held);
  EXPECT_FALSE(on->done(event));
}

TEST_P(driver_stream_contract, a_stream_waits_for_an_event_of_another) {
  const scoped_stream first(*on);
  const scoped_stream second(*on);
  const scoped_event event(*on);
  stream_gate gate(*on, first);
  int value = 0;
  int seen = 0;
  on->launch(first, [&] { value = 42; });
  on->record(event, first);
  on->wait(second, event);
  on->launch(second, [&] { seen = value; });
  EXPECT_FALSE(on->idle(second));
  gate.open();
  on->synchronize(second);
  EXPECT_EQ(seen, 42);
}

TEST_P(driver_stream_contract, a_wait_takes_the_record_at_the_time_of_the_call) {
  const scoped_stream held(*on);
  const scoped_stream free(*on);
  const scoped_stream waiting(*on);
  const scoped_event event(*on);
  on->wait(waiting, event);  // never recorded: nothing to wait for
  on->synchronize(waiting);

  stream_gate gate(*on, held);
  on->record(event, free);
  on->wait(waiting, event);
  on->record(event, held);
  on->synchronize(waiting);  // the later record does not hold it

  on->wait(waiting, event);
  on->record(event, free);
  on->synchronize(event);
  EXPECT_FALSE(on->idle(waiting)) << "the later record does not free it";
  gate.open();
  on->synchronize(waiting);
}

TEST_P(driver_stream_contract, a_destroyed_stream_finishes_its_work) {
  std::promise<int> result;
  auto outcome = result.get_future();
  const auto stream = on->create_stream(device_id{0});
  {
    stream_gate gate(*on, stream);
    on->launch(stream, [&] { result.set_value(5); });
    on->destroy_stream(stream);  // returns although the gate is closed
  }
  EXPECT_EQ(outcome.get(), 5);
}

TEST_P(driver_stream_contract, a_destroyed_event_still_holds_those_who_wait) {
  const scoped_stream held(*on);
  const scoped_stream waiting(*on);
  stream_gate gate(*on, held);
  int value = 0;
  int seen = 0;
  on->launch(held, [&] { value = 1; });
  const auto event = on->create_event(device_id{0});
  on->record(event, held);
  on->wait(waiting, event);
  on->destroy_event(event);
  on->launch(waiting, [&] { seen = value; });
  EXPECT_FALSE(on->idle(waiting));
  gate.open();
  on->synchronize(waiting);
  EXPECT_EQ(seen, 1);
}

TEST_P(driver_stream_contract, copies_between_tiers_and_ordinary_memory) {
  const scoped_stream stream(*on);
  std::vector<std::byte> source(granule);
  for (std::size_t i = 0; i < source.size(); ++i)
    source[i] = static_cast<std::byte>(i * 7 + i / 251);
  for (const auto from : tiers) {
    for (const auto to : tiers) {
      const auto first = make(from, granule);
      const auto second = make(to, granule);
      std::vector<std::byte> result(granule);
      on->copy(first.base(), reinterpret_cast<address>(source.data()), granule, stream);
      on->copy(second.base(), first.base(), granule, stream);
      on->copy(reinterpret_cast<address>(result.data()), second.base(), granule, stream);
      on->synchronize(stream);
      EXPECT_EQ(result, source) << to_string(from) << " to " << to_string(to);
    }
  }
}

TEST_P(driver_stream_contract, fills_and_copies_any_bytes_and_no_others) {
  for (const auto where : tiers) {
    const auto memory = make(where, granule);
    on->fill(memory.base(), std::byte{0}, 4096, nullptr);
    on->fill(memory.base() + 13, std::byte{0xab}, 101, nullptr);
    on->copy(memory.base() + 2001, memory.base() + 13, 101, nullptr);
    const auto found = read(memory.base(), 4096);
    for (std::size_t i = 0; i < found.size(); ++i) {
      const bool set = (i >= 13 && i < 114) || (i >= 2001 && i < 2102);
      ASSERT_EQ(found[i], set ? std::byte{0xab} : std::byte{0}) << i << ", " << to_string(where);
    }
  }
}

TEST_P(driver_stream_contract, copies_across_the_border_of_two_handles) {
  const address_range range(*on, 2 * granule);
  const physical_memory first(*on, {.bytes = granule, .where = device});
  const physical_memory second(*on, {.bytes = granule, .where = tiers.back()});
  const std::array grants{access_grant{device}};
  const mapping low(*on, range.base(), first, grants);
  const mapping high(*on, range.base() + granule, second, grants);
  write_pattern(*on, range.base(), 2 * granule, 21);
  EXPECT_TRUE(holds_pattern(*on, range.base(), 2 * granule, 21));
  on->fill(range.base() + granule - 8, std::byte{1}, 16, nullptr);
  EXPECT_EQ(read(range.base() + granule - 8, 16), std::vector<std::byte>(16, std::byte{1}));
}

TEST_P(driver_stream_contract, work_of_the_device_follows_stream_order) {
  const auto memory = make(device, granule);
  const scoped_stream first(*on);
  const scoped_stream second(*on);
  const scoped_event event(*on);
  on->fill(memory.base(), std::byte{1}, granule, first);
  on->synchronize(first);
  {
    const stream_gate gate(*on, first);
    on->fill(memory.base(), std::byte{2}, granule, first);
    on->record(event, first);
    on->wait(second, event);
    on->fill(memory.base(), std::byte{3}, granule / 2, second);
  }
  on->synchronize(second);
  EXPECT_EQ(read(memory.base(), 1).front(), std::byte{3});
  EXPECT_EQ(read(memory.base() + granule - 1, 1).front(), std::byte{2});
}

TEST_P(driver_stream_contract, the_default_stream_is_there) {
  bool ran = false;
  on->launch(nullptr, [&] { ran = true; });
  on->synchronize(native_stream{nullptr});
  EXPECT_TRUE(ran);
  EXPECT_TRUE(on->idle(nullptr));
  EXPECT_EQ(on->capture(nullptr).status, capture_status::none);
  EXPECT_THROW(on->destroy_stream(nullptr), invalid_argument);
}

TEST_P(driver_stream_contract, synchronising_throws_what_a_function_threw_once) {
  const scoped_stream stream(*on);
  bool went_on = false;
  on->launch(stream, [] { throw std::runtime_error("the function failed"); });
  on->launch(stream, [&] { went_on = true; });
  try {
    on->synchronize(stream);
    ADD_FAILURE() << "nothing was thrown";
  } catch (const std::runtime_error& failure) {
    EXPECT_STREQ(failure.what(), "the function failed");
  }
  on->synchronize(stream);
  EXPECT_TRUE(went_on);
  EXPECT_THROW(on->launch(stream, nullptr), invalid_argument);
}

TEST_P(driver_stream_contract, a_launched_function_may_not_call_the_driver) {
  const scoped_stream stream(*on);
  bool refused = false;
  on->launch(stream, [&] {
    try {
      on->synchronize(native_stream{stream});
    } catch (const invalid_argument&) {
      refused = true;
    }
  });
  on->synchronize(stream);
  EXPECT_TRUE(refused);
}

TEST_P(driver_stream_contract, a_function_is_gone_when_its_stream_is_synchronised) {
  const scoped_stream stream(*on);
  const auto held = std::make_shared<int>(1);
  on->launch(stream, [held] {});
  on->synchronize(stream);
  EXPECT_EQ(held.use_count(), 1) << "what it holds would go at an unknown time";
}

TEST_P(driver_stream_contract, no_stream_is_captured_unasked) {
  const scoped_stream stream(*on);
  EXPECT_EQ(on->capture(stream).status, capture_status::none);
  EXPECT_EQ(on->capture(stream).id, 0u);
}

TEST_P(driver_stream_contract, events_stay_on_their_device) {
  if (on->device_count() < 2) GTEST_SKIP() << "one device only";
  const scoped_event event(*on);
  const auto other = on->create_stream(device_id{1});
  const auto theirs = on->create_event(device_id{1});
  EXPECT_THROW(on->record(event, other), invalid_argument);
  on->record(theirs, other);
  const scoped_stream stream(*on);
  on->wait(stream, theirs);  // waiting crosses devices
  on->synchronize(stream);
  on->destroy_event(theirs);
  on->destroy_stream(other);
}

TEST_P(driver_stream_contract, threads_share_a_stream) {
  const scoped_stream stream(*on);
  constexpr int k_threads = 4;
  constexpr int k_each = 50;
  int sum = 0;  // only the stream touches it
  std::vector<std::thread> threads;
  for (int t = 0; t < k_threads; ++t) {
    threads.emplace_back([&] {
      const scoped_event event(*on);
      for (int i = 0; i < k_each; ++i) {
        on->launch(stream, [&] { ++sum; });
        on->record(event, stream);
      }
      on->synchronize(event);
    });
  }
  for (auto& thread : threads) thread.join();
  on->synchronize(stream);
  EXPECT_EQ(sum, k_threads * k_each);
}

}  // namespace evmm::test
