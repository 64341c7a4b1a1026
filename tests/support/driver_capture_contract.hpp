// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_contract.hpp"
#include "tests/support/scoped_capture.hpp"

#include <algorithm>
#include <cstring>
#include <set>

// Streams in a graph capture, and what its nodes depend on.

namespace evmm::test {

class driver_capture_contract : public driver_contract {
 protected:
  /// Whether all of `before` is among `from` and what that depends on, directly or not.
  bool reaches(std::vector<graph_node> from, const std::vector<graph_node>& before) {
    std::set<graph_node> met(from.begin(), from.end());
    while (!from.empty()) {
      const graph_node next = from.back();
      from.pop_back();
      for (const auto each : on->graph_dependencies(next)) {
        if (met.insert(each).second) from.push_back(each);
      }
    }
    return std::all_of(before.begin(), before.end(),
                       [&](graph_node each) { return met.count(each) != 0; });
  }
};

TEST_P(driver_capture_contract, a_stream_outside_of_captures_has_no_frontier) {
  const scoped_stream stream(*on);
  const auto memory = make(device, granule);
  on->fill(memory.base(), std::byte{1}, 64, stream);
  EXPECT_TRUE(on->capture_frontier(stream).empty());
  EXPECT_TRUE(on->capture_frontier(nullptr).empty());
  on->synchronize(native_stream{stream});
  EXPECT_THROW(on->graph_dependencies(graph_node{}), invalid_argument);
}

TEST_P(driver_capture_contract, work_of_a_stream_depends_on_what_was_before) {
  const scoped_stream stream(*on);
  const scoped_stream other(*on);
  const auto memory = make(device, granule);
  scoped_capture capture(*on, stream);
  EXPECT_EQ(on->capture(stream).status, capture_status::active);
  EXPECT_TRUE(on->capture_frontier(stream).empty()) << "nothing was enqueued";
  on->fill(memory.base(), std::byte{1}, 64, stream);
  const auto first = on->capture_frontier(stream);
  ASSERT_EQ(first.size(), 1u);
  EXPECT_TRUE(on->graph_dependencies(first.front()).empty());
  EXPECT_EQ(on->capture_frontier(stream), first) << "asking adds nothing";
  on->fill(memory.base(), std::byte{2}, 64, stream);
  const auto second = on->capture_frontier(stream);
  ASSERT_EQ(second.size(), 1u);
  EXPECT_NE(second, first);
  EXPECT_EQ(on->graph_dependencies(second.front()), first);
  EXPECT_TRUE(reaches(second, first));
  EXPECT_FALSE(reaches(first, second));
  EXPECT_TRUE(on->capture_frontier(other).empty());
  capture.end();
  EXPECT_TRUE(on->capture_frontier(stream).empty());
  EXPECT_EQ(on->capture(stream).status, capture_status::none);
}

TEST_P(driver_capture_contract, an_event_carries_dependencies_to_another_stream_and_back) {
  const scoped_stream origin(*on);
  const scoped_stream side(*on);
  const scoped_event forked(*on);
  const scoped_event joined(*on);
  const auto memory = make(device, granule);
  const address at = memory.base();
  scoped_capture capture(*on, origin);
  on->fill(at, std::byte{1}, 64, origin);
  const auto before_fork = on->capture_frontier(origin);
  on->record(forked, origin);
  on->fill(at + 64, std::byte{2}, 64, origin);
  const auto after_fork = on->capture_frontier(origin);
  on->wait(side, forked);
  EXPECT_EQ(on->capture(side).id, on->capture(origin).id);
  EXPECT_TRUE(reaches(on->capture_frontier(side), before_fork));
  EXPECT_FALSE(reaches(on->capture_frontier(side), after_fork)) << "it came after the record";
  on->fill(at + 128, std::byte{3}, 64, side);
  const auto on_side = on->capture_frontier(side);
  EXPECT_TRUE(reaches(on_side, before_fork));
  EXPECT_FALSE(reaches(on_side, after_fork));
  EXPECT_FALSE(reaches(on->capture_frontier(origin), on_side)) << "not joined yet";
  on->record(joined, side);
  on->wait(origin, joined);
  EXPECT_TRUE(reaches(on->capture_frontier(origin), on_side));
  EXPECT_TRUE(reaches(on->capture_frontier(origin), after_fork));
  on->copy(at + 192, at, 64, origin);
  const auto last = on->capture_frontier(origin);
  ASSERT_EQ(last.size(), 1u);
  EXPECT_TRUE(reaches(last, on_side) && reaches(last, after_fork));
  capture.end();
}

TEST_P(driver_capture_contract, a_graph_runs_what_was_captured) {
  const scoped_stream stream(*on);
  const auto memory = make(device, granule);
  const address pinned = on->allocate_pinned(256);
  const auto* const seen = reinterpret_cast<const unsigned char*>(pinned);
  std::memset(reinterpret_cast<void*>(pinned), 0, 256);
  scoped_capture capture(*on, stream);
  on->fill(memory.base(), std::byte{7}, 256, stream);
  on->copy(pinned, memory.base(), 256, stream);
  capture.end();
  on->synchronize(native_stream{stream});
  EXPECT_EQ(seen[0], 0) << "captured work does not run";
  capture.launch(stream);
  on->synchronize(native_stream{stream});
  EXPECT_EQ(seen[0], 7);
  EXPECT_EQ(seen[255], 7);
  on->free_pinned(pinned);
}

TEST_P(driver_capture_contract, memory_calls_and_other_streams_do_not_disturb_a_capture) {
  const scoped_stream stream(*on);
  const scoped_stream other(*on);
  const scoped_event event(*on);
  const auto memory = make(device, granule);
  scoped_capture capture(*on, stream);
  on->fill(memory.base(), std::byte{1}, 64, stream);
  {
    const auto more = make(device, granule);
    on->free_pinned(on->allocate_pinned(4096));
    on->fill(more.base(), std::byte{1}, 64, other);
    on->record(event, other);
    on->synchronize(event);
    EXPECT_TRUE(on->done(event));
    EXPECT_TRUE(on->idle(other));
    const address at = on->allocate_async(device_id{0}, granule, other);
    on->free_async(at, other);
    on->synchronize(native_stream{other});
    on->trim_async(device_id{0}, 0);
    EXPECT_LE(on->usage(device).free_bytes, on->usage(device).total_bytes);
  }
  EXPECT_EQ(on->capture(stream).status, capture_status::active);
  EXPECT_EQ(on->capture_frontier(stream).size(), 1u);
  capture.end();
}

TEST_P(driver_capture_contract, stream_ordered_memory_is_not_for_captured_streams) {
  const scoped_stream stream(*on);
  const scoped_stream other(*on);
  const address at = on->allocate_async(device_id{0}, granule, other);
  {
    scoped_capture capture(*on, stream);
    EXPECT_THROW(on->allocate_async(device_id{0}, granule, stream), unsupported);
    EXPECT_THROW(on->free_async(at, stream), unsupported);
    EXPECT_EQ(on->capture(stream).status, capture_status::active);
    EXPECT_TRUE(on->capture_frontier(stream).empty());
    capture.end();
  }
  on->free_async(at, other);  // the refused free has changed nothing
  on->synchronize(native_stream{other});
  on->trim_async(device_id{0}, 0);
}

TEST_P(driver_capture_contract, a_stream_is_usable_after_its_capture_was_invalidated) {
  const scoped_stream stream(*on);
  const scoped_stream other(*on);
  const scoped_event outside(*on);
  const auto memory = make(device, granule);
  on->fill(memory.base(), std::byte{1}, 64, other);
  on->record(outside, other);
  {
    scoped_capture capture(*on, stream);
    on->fill(memory.base(), std::byte{2}, 64, stream);
    EXPECT_THROW(on->wait(stream, outside), invalid_argument);
    EXPECT_EQ(on->capture(stream).status, capture_status::invalidated);
    EXPECT_TRUE(on->capture_frontier(stream).empty());
    EXPECT_THROW(capture.end(), error);
  }
  EXPECT_EQ(on->capture(stream).status, capture_status::none);
  on->wait(stream, outside);
  on->fill(memory.base(), std::byte{3}, 64, stream);
  on->synchronize(native_stream{stream});
  EXPECT_EQ(read(memory.base(), 1).front(), std::byte{3});
  scoped_capture again(*on, stream);
  on->fill(memory.base(), std::byte{4}, 64, stream);
  EXPECT_EQ(on->capture_frontier(stream).size(), 1u);
  again.end();
}

}  // namespace evmm::test
