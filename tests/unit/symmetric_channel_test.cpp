// SPDX-License-Identifier: Apache-2.0
#include "comm/message_head.hpp"
#include "comm/thread_link.hpp"
#include "comm/wire.hpp"
#include "tests/support/channel_cases.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_hosts.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;
using std::chrono::milliseconds;

class channel_threads : public ::testing::TestWithParam<std::tuple<symmetric_case, std::string>> {};

TEST_P(channel_threads, holds) {
  const auto& [tried, hosts] = GetParam();
  run_hosts(hosts, tried.run);
}
const auto k_hosts = ::testing::Values("a", "aaa", "aabb", "abc", "aaab");
const auto k_name = [](const auto& info) {
  return std::get<0>(info.param).name + "_" + std::get<1>(info.param);
};
INSTANTIATE_TEST_SUITE_P(pairs, channel_threads,
                         ::testing::Combine(::testing::ValuesIn(channel_cases()), k_hosts), k_name);
INSTANTIATE_TEST_SUITE_P(all, channel_threads,
                         ::testing::Combine(::testing::ValuesIn(channel_collective_cases()),
                                            k_hosts),
                         k_name);

// --- ranks that are lost ------------------------------------------------------------------------

class lost_peers : public ::testing::TestWithParam<std::string> {};
INSTANTIATE_TEST_SUITE_P(hosts, lost_peers, ::testing::Values("aa", "ab"),
                         [](const auto& info) { return info.param; });

/// Rank 1 makes the channel and no call of it; rank 0 does `call`, which no stream can end.
void expect_lost(const std::string& hosts, const std::string& says,
                 const std::function<void(symmetric_channel&, native_stream)>& call) {
  run_hosts(hosts, [&](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    symmetric_channel channel(region, {});
    at.ranks->set_timeout(milliseconds(10'000));
    at.ranks->barrier("test: the channel is there");
    if (at.ranks->rank() == rank_id{0}) {
      at.ranks->set_timeout(milliseconds(200));
      const native_stream stream = at.on->create_stream(at.device);
      call(channel, stream);
      const auto since = std::chrono::steady_clock::now();
      const auto said = thrown_by([&] { channel.synchronize(stream); });
      EXPECT_LT(std::chrono::steady_clock::now() - since, milliseconds(5000));
      EXPECT_EQ(said, "timed_out: rank 1 " + says +
                          " within 0.2 s; help: see what became of that rank; EVMM_TIMEOUT_MS or "
                          "set_timeout allows more time");
      EXPECT_EQ(thrown_by([&] { channel.check(); }), said);
      EXPECT_EQ(thrown_by([&] { channel.barrier(stream); }), said) << "it stays broken";
      EXPECT_TRUE(at.on->idle(stream)) << "the stream was let go";
      at.on->destroy_stream(stream);
      at.ranks->set_timeout(milliseconds(10'000));
    }
    at.ranks->barrier("test: rank 0 has seen it");
  });
}

TEST_P(lost_peers, a_signal_that_does_not_come_names_its_rank) {
  expect_lost(GetParam(), "did not signal 7 at offset 64 (wait_signal)",
              [](symmetric_channel& channel, native_stream stream) {
                channel.wait_signal({1}, {64, 7}, stream);
              });
}

TEST_P(lost_peers, a_barrier_names_who_did_not_come) {
  expect_lost(GetParam(), "did not signal barrier 1",
              [](symmetric_channel& channel, native_stream stream) { channel.barrier(stream); });
}

TEST_P(lost_peers, an_all_to_all_names_who_did_not_come) {
  expect_lost(GetParam(), "did not signal all_to_all_v 1",
              [](symmetric_channel& channel, native_stream stream) {
                const std::vector<outgoing_block> out = {{}, {.bytes = 64}};
                const std::vector<incoming_block> in = {{}, {.bytes = 64}};
                channel.all_to_all_v(out, in, stream);
              });
}

TEST(symmetric_channel, a_get_that_nobody_answers_names_its_rank) {
  run_hosts("ab", [](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    std::optional<symmetric_channel> channel(std::in_place, region);
    at.ranks->barrier("test: both are there");
    if (at.ranks->rank() == rank_id{1}) channel.reset();  // as if it had died
    at.ranks->barrier("test: rank 1 is gone");
    if (at.ranks->rank() != rank_id{0}) return;
    at.ranks->set_timeout(milliseconds(200));
    const native_stream stream = at.on->create_stream(at.device);
    std::vector<std::byte> into(64);
    channel->get({1}, 0, into, stream);
    const auto said = thrown_by([&] { channel->synchronize(stream); });
    EXPECT_EQ(said.find("timed_out: rank 1 did not answer a get of 64 bytes within 0.2 s"), 0u)
        << said;
    at.on->destroy_stream(stream);
  });
}

TEST(symmetric_channel, a_driver_that_fails_breaks_it_and_frees_the_stream) {
  run_hosts("ab", [](const rank_context& outer) {
    rank_context at = outer;
    const auto faulty = fault_driver::make(outer.on);
    at.on = faulty;
    auto region = at.make();
    region.grow(tier::device, at.granule());
    symmetric_channel channel(region);
    at.ranks->barrier("test: both are there");
    if (at.ranks->rank() == rank_id{0}) {
      const native_stream stream = at.on->create_stream(at.device);
      stream_gate gate(*at.on, stream);
      std::vector<std::byte> source(64);
      channel.put({1}, 0, source, stream);
      faulty->fail_call(driver_call::copy, 0);  // the engine's, when the stream gets there
      gate.open();
      const auto said = thrown_by([&] { channel.synchronize(stream); });
      EXPECT_EQ(said, "driver_error: copy fails because a test said so");
      EXPECT_TRUE(faulty->disarm());
      at.on->destroy_stream(stream);
    }
    at.ranks->barrier("test: rank 0 is through");
  });
}

/// Rank 0's engine fails at one call after the other while it puts, gets and is put to.
TEST(symmetric_channel, what_fails_on_its_way_leaves_nothing_behind) {
  int points = 0;
  for (const driver_call kind : {driver_call::copy, driver_call::record, driver_call::done}) {
    for (std::size_t nth = 0, failed = 1; failed != 0 && nth < 40; ++nth) {
      run_hosts("ab", [&](const rank_context& outer) {
        rank_context at = outer;
        const auto faulty = fault_driver::make(outer.on);
        at.on = faulty;
        auto region = at.make();
        region.grow(tier::device, at.granule());
        const native_stream stream = at.on->create_stream(at.device);
        const bool fails = at.ranks->rank() == rank_id{0};
        const rank_id peer{fails ? 1 : 0};
        const auto before = faulty->alive();
        std::optional<symmetric_channel> channel(std::in_place, region,
                                                 channel_options{.chunk_bytes = 4096, .chunks = 2});
        std::vector<std::byte> bytes(20'000);
        at.ranks->set_timeout(milliseconds(10'000));
        at.ranks->barrier("test: both are there");
        if (fails) faulty->fail_call(kind, nth);
        const auto said = thrown_by([&] {
          channel->put(peer, 0, bytes, stream);
          if (fails) channel->get(peer, 0, bytes, stream);
          channel->synchronize(stream);
        });
        const bool hit = fails && faulty->disarm();
        at.ranks->barrier("test: both are through");
        channel.reset();
        at.on->synchronize(stream);
        if (fails) {
          EXPECT_EQ(said.empty(), !hit);
          failed = hit ? 1 : 0;
          points += hit ? 1 : 0;
          auto after = faulty->alive();
          after.descriptors = before.descriptors;
          EXPECT_EQ(after, before) << to_string(kind) << " " << nth << ": " << said;
        }
        at.on->destroy_stream(stream);
      });
    }
  }
  EXPECT_GT(points, 20);
}

/// A rank whose region is larger, or was before it shrank.
TEST(symmetric_channel, what_is_meant_for_bytes_that_are_not_there_is_named) {
  for (const bool signal : {false, true}) {
    const auto office = std::make_shared<post_office>(2);
    run_hosts("ab", [&](const rank_context& at) {
      auto region = at.make();
      region.grow(tier::device, at.granule());
      const rank_id me = at.ranks->rank();
      symmetric_channel channel(region, {.link = std::make_shared<thread_link>(me, office)});
      const native_stream stream = at.on->create_stream(at.device);
      if (me == rank_id{0}) {
        at.ranks->set_timeout(milliseconds(200));
        message_head head{.offset = signal ? 0 : region.size(), .bytes = 0};
        if (!signal) head.bytes = 64;
        if (signal) head.signals = message_head::data;
        if (signal) head.signal_offset = region.size() + 8;
        office->post(me, {rank_id{1}, wire_writer().put(head).take()});
        channel.signal(me, {0, 1}, stream);  // any call tells the channel of the timeout
        std::string said;
        while (said.empty()) said = thrown_by([&] { channel.check(); });
        EXPECT_EQ(said.find(signal ? "peer_error: rank 1 uses 8 bytes at offset 2097160 of this "
                                     "rank's part, which has 2097152;"
                                   : "peer_error: rank 1 uses 64 bytes at offset 2097152 of this "
                                     "rank's part, which has 2097152;"),
                  0u)
            << said;
        at.ranks->set_timeout(milliseconds(20'000));
      }
      at.on->destroy_stream(stream);
      at.ranks->barrier("test: rank 0 has seen it");
    });
  }
}

TEST(symmetric_channel, the_bootstraps_timeout_holds_before_its_first_call) {
  const auto office = std::make_shared<post_office>(2);
  run_hosts("ab", [&](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    const rank_id me = at.ranks->rank();
    at.ranks->set_timeout(milliseconds(1000));
    symmetric_channel channel(region, {.link = std::make_shared<thread_link>(me, office)});
    at.ranks->set_timeout(milliseconds(20'000));
    if (me == rank_id{0}) {
      const message_head head{.offset = region.size(), .bytes = 64};
      office->post(me, {rank_id{1}, wire_writer().put(head).take()});
      const auto since = std::chrono::steady_clock::now();
      std::string said;
      while (said.empty()) said = thrown_by([&] { channel.check(); });
      EXPECT_EQ(said.find("peer_error: rank 1 uses 64 bytes"), 0u) << said;
      EXPECT_LT(std::chrono::steady_clock::now() - since, milliseconds(10'000));
    }
    at.ranks->barrier("test: rank 0 has seen it");
  });
}

TEST_P(lost_peers, null_addresses_are_refused_whatever_the_way) {
  run_hosts(GetParam(), [](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    symmetric_channel channel(region);
    const native_stream stream = at.on->create_stream(at.device);
    for (const rank_id peer : {rank_id{0}, rank_id{1}}) {
      EXPECT_EQ(thrown_by([&] {
                  channel.put(peer, 0, {static_cast<const std::byte*>(nullptr), 16}, stream);
                }),
                "invalid_argument: a put of 16 bytes at a null address");
      EXPECT_EQ(thrown_by([&] {
                  channel.get(peer, 0, {static_cast<std::byte*>(nullptr), 8}, stream);
                }),
                "invalid_argument: a get of 8 bytes at a null address");
    }
    channel.put({0}, 0, {}, stream);
    channel.synchronize(stream);
    channel.close();
    at.on->destroy_stream(stream);
    region.close();
  });
}

/// Rank 1 fails at one call after the other until it has all that a channel needs.
TEST_P(lost_peers, a_rank_that_cannot_make_a_channel_fails_it_on_all) {
  run_hosts(GetParam(), [](const rank_context& outer) {
    rank_context at = outer;
    const auto faulty = fault_driver::make(outer.on);
    at.on = faulty;
    auto region = at.make();
    region.grow(tier::device, at.granule());
    const bool fails = at.ranks->rank() == rank_id{1};
    for (const driver_call kind :
         {driver_call::create_stream, driver_call::create_event, driver_call::allocate_pinned}) {
      for (std::size_t nth = 0;; ++nth) {
        const auto before = faulty->alive();
        if (fails) faulty->fail_call(kind, nth);
        std::optional<symmetric_channel> made;
        const auto said =
            thrown_by_all(*at.ranks, [&] { made.emplace(region, channel_options{.chunks = 2}); });
        const bool failed = at.ranks->all_gather_value(fails && faulty->disarm())[1];
        if (made) made->close();
        made.reset();
        auto after = faulty->alive();
        after.descriptors = before.descriptors;  // the process's, and so of all ranks
        EXPECT_EQ(after, before);
        if (!failed) {
          EXPECT_EQ(said, "");
          break;
        }
        EXPECT_NE(said.find("fails because a test said so"), std::string::npos) << said;
      }
    }
    region.close();
  });
}

TEST_P(lost_peers, a_channel_that_goes_lets_streams_go) {
  run_hosts(GetParam(), [](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    std::optional<symmetric_channel> channel(std::in_place, region);
    const native_stream stream = at.on->create_stream(at.device);
    if (at.ranks->rank() == rank_id{0}) {
      std::atomic<bool> there = false;
      at.on->launch(stream, [&] { there = true; });
      channel->wait_signal({1}, {64, 7}, stream);
      channel->barrier(stream);
      while (!there) std::this_thread::yield();
    }
    channel.reset();
    const auto until = std::chrono::steady_clock::now() + milliseconds(5000);
    while (!at.on->idle(stream) && std::chrono::steady_clock::now() < until) {
      std::this_thread::yield();
    }
    EXPECT_TRUE(at.on->idle(stream));
    at.ranks->barrier("test: rank 0's is gone");
    at.on->destroy_stream(stream);
  });
}

TEST(symmetric_channel, what_it_counted_can_be_asked_for_after_its_end) {
  run_hosts("ab", [](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    symmetric_channel channel(region);
    const native_stream stream = at.on->create_stream(at.device);
    channel.put({1 - at.ranks->rank().value}, 0, {region.local() + 4096, 4096}, stream);
    channel.synchronize(stream);
    channel.close();
    EXPECT_EQ(channel.statistics().link_bytes, 4096u);
    EXPECT_EQ(channel.statistics().link_bytes_received, 4096u);
    EXPECT_GT(channel.statistics().link_messages_received, 0u);
    at.on->destroy_stream(stream);
    region.close();
  });
}

TEST(symmetric_channel, a_rank_that_may_not_exchange_says_so_before_anything_moves) {
  run_hosts("ab", [](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    symmetric_channel channel(region, {.check_counts = true});
    const native_stream stream = at.on->create_stream(at.device);
    std::optional<scoped_capture> capture;
    if (at.ranks->rank() == rank_id{1}) capture.emplace(*at.on, stream);
    const std::vector<outgoing_block> out(2);
    const std::vector<incoming_block> in(2);
    const auto said = thrown_by_all(*at.ranks, [&] { channel.all_to_all_v(out, in, stream); });
    EXPECT_EQ(said.find("unsupported: rank 1: a channel's calls cannot be captured"), 0u) << said;
    capture.reset();
    channel.all_to_all_v(out, in, stream);
    channel.synchronize(stream);
    at.on->destroy_stream(stream);
    channel.close();
    region.close();
  });
}

}  // namespace
}  // namespace evmm::test
