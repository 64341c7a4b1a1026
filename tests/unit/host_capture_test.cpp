// SPDX-License-Identifier: Apache-2.0
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <vector>

// Capture behaves as CUDA's does: each rule here was run on a GPU with cuStreamBeginCapture.

namespace evmm::test {
namespace {

using ::testing::ElementsAre;

class host_capture : public ::testing::Test {
 protected:
  void SetUp() override {
    for (auto& stream : streams) stream = on->create_stream({0});
    for (auto& event : events) event = on->create_event({0});
  }
  void note(native_stream stream, int what) {
    on->launch(stream, [this, what] { order.push_back(what); });
  }
  long position(int what) const {
    return std::find(order.begin(), order.end(), what) - order.begin();
  }

  const std::shared_ptr<host_driver> on = host_driver::make({.devices = 1});
  std::array<native_stream, 3> streams{};
  std::array<native_event, 3> events{};
  std::vector<int> order;
};

TEST_F(host_capture, records_work_instead_of_running_it) {
  on->begin_capture(streams[0]);
  const auto during = on->capture(streams[0]);
  EXPECT_EQ(during.status, capture_status::active);
  EXPECT_NE(during.id, 0u);
  note(streams[0], 1);
  note(streams[0], 2);
  const auto graph = on->end_capture(streams[0]);
  EXPECT_EQ(on->capture(streams[0]).status, capture_status::none);
  on->synchronize(streams[0]);
  EXPECT_TRUE(order.empty());
  on->launch_graph(graph, streams[0]);
  on->launch_graph(graph, streams[0]);
  on->synchronize(streams[0]);
  EXPECT_THAT(order, ElementsAre(1, 2, 1, 2));
  on->begin_capture(streams[0]);
  EXPECT_NE(on->capture(streams[0]).id, during.id);
  static_cast<void>(on->end_capture(streams[0]));
}

TEST_F(host_capture, copies_and_fills_are_captured_too) {
  std::array<std::byte, 8> from{};
  std::array<std::byte, 8> to{};
  on->begin_capture(streams[0]);
  on->fill(reinterpret_cast<address>(from.data()), std::byte{4}, from.size(), streams[0]);
  on->copy(reinterpret_cast<address>(to.data()), reinterpret_cast<address>(from.data()), to.size(),
           streams[0]);
  const auto graph = on->end_capture(streams[0]);
  EXPECT_EQ(to[7], std::byte{0});
  on->launch_graph(graph, streams[1]);
  on->synchronize(streams[1]);
  EXPECT_EQ(to[7], std::byte{4});
}

TEST_F(host_capture, an_event_brings_another_stream_in_and_back) {
  on->begin_capture(streams[0]);
  note(streams[0], 1);
  on->record(events[0], streams[0]);
  on->wait(streams[1], events[0]);
  EXPECT_EQ(on->capture(streams[1]).id, on->capture(streams[0]).id);
  note(streams[1], 2);
  note(streams[0], 3);
  on->record(events[1], streams[1]);
  on->wait(streams[0], events[1]);
  note(streams[0], 4);
  const auto graph = on->end_capture(streams[0]);
  EXPECT_EQ(on->capture(streams[1]).status, capture_status::none);
  on->launch_graph(graph, streams[2]);
  on->synchronize(streams[2]);
  ASSERT_EQ(order.size(), 4u);
  EXPECT_LT(position(1), position(2));
  EXPECT_LT(position(1), position(3));
  EXPECT_EQ(position(4), 3);
}

TEST_F(host_capture, a_forked_stream_must_be_joined_if_it_has_work) {
  on->begin_capture(streams[0]);
  note(streams[0], 1);
  on->record(events[0], streams[0]);
  on->wait(streams[1], events[0]);
  EXPECT_NE(on->end_capture(streams[0]), nullptr) << "nothing was added on the other stream";

  on->begin_capture(streams[0]);
  on->record(events[0], streams[0]);
  on->wait(streams[1], events[0]);
  note(streams[1], 2);
  EXPECT_THROW(on->end_capture(streams[0]), invalid_argument);
  for (const auto stream : {streams[0], streams[1]}) {
    EXPECT_EQ(on->capture(stream).status, capture_status::none);
    on->synchronize(stream);
  }
  EXPECT_TRUE(order.empty());
}

TEST_F(host_capture, waiting_for_work_outside_invalidates) {
  on->begin_capture(streams[0]);
  on->wait(streams[0], events[2]);  // never recorded: nothing to wait for
  EXPECT_EQ(on->capture(streams[0]).status, capture_status::active);
  static_cast<void>(on->end_capture(streams[0]));

  on->record(events[2], streams[1]);
  on->synchronize(events[2]);
  on->begin_capture(streams[0]);
  EXPECT_THROW(on->wait(streams[0], events[2]), invalid_argument) << "although it is done";
  EXPECT_EQ(on->capture(streams[0]).status, capture_status::invalidated);
  EXPECT_EQ(on->capture(streams[0]).id, 0u);
  EXPECT_THROW(note(streams[0], 1), invalid_argument);
  EXPECT_THROW(on->end_capture(streams[0]), invalid_argument);
  note(streams[0], 2);
  on->synchronize(streams[0]);
  EXPECT_THAT(order, ElementsAre(2));
}

TEST_F(host_capture, synchronising_or_querying_invalidates) {
  const std::array<std::function<void()>, 4> questions{
      [this] { on->synchronize(streams[0]); }, [this] { on->idle(streams[0]); },
      [this] { on->synchronize(events[0]); }, [this] { on->done(events[0]); }};
  for (const auto& ask : questions) {
    on->begin_capture(streams[0]);
    on->record(events[0], streams[0]);
    EXPECT_THROW(ask(), invalid_argument);
    EXPECT_EQ(on->capture(streams[0]).status, capture_status::invalidated);
    EXPECT_THROW(on->end_capture(streams[0]), invalid_argument);
  }
}

TEST_F(host_capture, an_event_of_a_capture_means_nothing_after_it) {
  on->begin_capture(streams[0]);
  on->record(events[0], streams[0]);
  static_cast<void>(on->end_capture(streams[0]));
  EXPECT_THROW(on->done(events[0]), invalid_argument);
  EXPECT_THROW(on->synchronize(events[0]), invalid_argument);
  EXPECT_THROW(on->wait(streams[1], events[0]), invalid_argument);
  EXPECT_EQ(on->capture(streams[1]).status, capture_status::none);
  on->record(events[0], streams[1]);
  on->synchronize(events[0]);
  EXPECT_TRUE(on->done(events[0]));
}

TEST_F(host_capture, begins_and_ends_on_one_stream_that_is_not_the_default) {
  EXPECT_THROW(on->begin_capture(nullptr), invalid_argument);
  EXPECT_THROW(on->end_capture(streams[0]), invalid_argument);
  on->begin_capture(streams[0]);
  EXPECT_THROW(on->begin_capture(streams[0]), invalid_argument);
  EXPECT_EQ(on->capture(streams[0]).status, capture_status::active);
  on->record(events[0], streams[0]);
  on->wait(streams[1], events[0]);
  EXPECT_THROW(on->end_capture(streams[1]), invalid_argument);
  EXPECT_THROW(on->end_capture(streams[0]), invalid_argument) << "that invalidated it";
}

TEST_F(host_capture, the_default_stream_and_other_captures_cannot_join) {
  on->begin_capture(streams[0]);
  on->record(events[0], streams[0]);
  EXPECT_THROW(on->wait(nullptr, events[0]), invalid_argument);
  EXPECT_THROW(on->end_capture(streams[0]), invalid_argument);

  on->begin_capture(streams[0]);
  on->begin_capture(streams[1]);
  on->record(events[0], streams[0]);
  EXPECT_THROW(on->wait(streams[1], events[0]), invalid_argument);
  EXPECT_THROW(on->end_capture(streams[0]), invalid_argument);
  EXPECT_THROW(on->end_capture(streams[1]), invalid_argument);
}

TEST_F(host_capture, other_streams_go_on_meanwhile) {
  on->begin_capture(streams[0]);
  note(nullptr, 1);
  on->synchronize(native_stream{nullptr});
  note(streams[1], 2);
  on->synchronize(streams[1]);
  static_cast<void>(on->end_capture(streams[0]));
  EXPECT_THAT(order, ElementsAre(1, 2));
}

TEST_F(host_capture, streams_can_be_destroyed_in_a_capture) {
  on->begin_capture(streams[0]);
  on->record(events[0], streams[0]);
  on->wait(streams[1], events[0]);
  on->destroy_stream(streams[1]);
  EXPECT_NE(on->end_capture(streams[0]), nullptr) << "it had no work of its own";

  on->begin_capture(streams[0]);
  on->record(events[0], streams[0]);
  on->wait(streams[2], events[0]);
  on->destroy_stream(streams[0]);
  EXPECT_EQ(on->capture(streams[2]).status, capture_status::none) << "the capture went with it";
}

TEST_F(host_capture, a_graph_can_be_part_of_a_graph) {
  on->begin_capture(streams[0]);
  note(streams[0], 1);
  const auto inner = on->end_capture(streams[0]);
  on->begin_capture(streams[0]);
  on->launch_graph(inner, streams[0]);
  note(streams[0], 2);
  const auto outer = on->end_capture(streams[0]);
  on->launch_graph(outer, streams[0]);
  on->synchronize(streams[0]);
  EXPECT_THAT(order, ElementsAre(1, 2));
  EXPECT_THROW(on->launch_graph(nullptr, streams[0]), invalid_argument);
}

TEST_F(host_capture, tells_dependencies_while_the_capture_is_active) {
  on->begin_capture(streams[0]);
  note(streams[0], 1);
  on->record(events[0], streams[0]);
  on->wait(streams[1], events[0]);
  on->wait(streams[2], events[0]);
  const auto fork = on->capture_frontier(streams[0]);
  ASSERT_EQ(fork.size(), 1u);
  EXPECT_EQ(on->capture_frontier(streams[1]), fork);
  note(streams[1], 2);
  note(streams[2], 3);
  on->record(events[1], streams[1]);
  on->record(events[2], streams[2]);
  on->wait(streams[0], events[1]);
  on->wait(streams[0], events[2]);
  const auto joined = on->capture_frontier(streams[0]);
  EXPECT_THAT(joined, ElementsAre(fork[0], on->capture_frontier(streams[1])[0],
                                  on->capture_frontier(streams[2])[0]));
  note(streams[0], 4);
  const auto last = on->capture_frontier(streams[0]);
  ASSERT_EQ(last.size(), 1u);
  EXPECT_EQ(on->graph_dependencies(last[0]), joined);
  EXPECT_EQ(on->graph_dependencies(joined[2]), fork);
  static_cast<void>(on->end_capture(streams[0]));
  EXPECT_THROW(on->graph_dependencies(last[0]), invalid_argument) << "it is over";
  on->begin_capture(streams[0]);
  note(streams[0], 5);
  EXPECT_NE(on->capture_frontier(streams[0]), fork) << "names are not used twice";
  static_cast<void>(on->end_capture(streams[0]));
}

}  // namespace
}  // namespace evmm::test
