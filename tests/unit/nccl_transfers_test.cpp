// SPDX-License-Identifier: Apache-2.0
// Large puts and gets of a channel over an NCCL link: threads as ranks, each on a host of its own
// or some on one, and a fake NCCL whose sends and receives hold their streams as NCCL's do.
#include "tests/support/channel_bench.hpp"
#include "tests/support/fake_gin_kernels.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/nccl_ranks.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/comm/symmetric_channel.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <optional>
#include <random>
#include <span>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

using std::chrono::milliseconds;
using testing::HasSubstr;
using testing::StartsWith;

constexpr nccl_link_options k_link = {.large = 8_KiB, .large_piece = 40'000};

/// Sends, and hears nothing.
class deaf_link final : public node_link {
 public:
  explicit deaf_link(std::shared_ptr<node_link> sends) : sends_(std::move(sends)) {}
  std::string name() const override { return sends_->name(); }
  transfer send(rank_id to, std::span<const std::byte> message) override {
    return sends_->send(to, message);
  }
  std::optional<arrival> probe() override { return std::nullopt; }
  transfer receive(std::span<std::byte> into) override { return sends_->receive(into); }
  bool done(transfer which) override { return sends_->done(which); }

 private:
  std::shared_ptr<node_link> sends_;
};

struct large_job {
  std::string hosts = "ab";  ///< one letter for each rank
  int deaf = -1;             ///< the rank that hears no messages
  fake_nccl_settings settings = {};
  /// By rank, where they differ.
  std::vector<nccl_link_options> links = {};
  milliseconds timeout = milliseconds(20'000);
};

/// Runs a body on every rank, whose channels have a link over NCCL.
void run_large(const large_job& job, const std::function<void(const rank_context&)>& body) {
  const nccl_fixture fake(job.settings);
  use_fake_gin(nullptr);
  std::vector<std::string> names;
  for (const char host : job.hosts) names.emplace_back(1, host);
  const int size = static_cast<int>(names.size());
  const auto bootstraps = make_thread_bootstraps(size, names);
  std::vector<std::shared_ptr<driver>> drivers;
  for (const auto& each : bootstraps) {
    each->set_timeout(job.timeout);
    drivers.push_back(host_driver::make({.device_bytes = 1_GiB, .host_bytes = 4_GiB}));
  }
  const fake_nccl_streams streams(drivers);
  const auto thrown = run_ranks(size, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    const auto& ranks = bootstraps[r];
    nccl_communicator nccl(ranks, drivers[r]);
    const nccl_link_options& options = job.links.empty() ? k_link : job.links[r];
    body({.ranks = ranks, .on = drivers[r], .link = [&] {
            std::shared_ptr<node_link> messages = ranks->make_link();
            if (rank == job.deaf) messages = std::make_shared<deaf_link>(std::move(messages));
            return make_nccl_link(nccl, std::move(messages), options);
          }});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

// --- all that a channel promises ----------------------------------------------------------------

class large_channel : public ::testing::TestWithParam<std::tuple<symmetric_case, std::string>> {};

TEST_P(large_channel, holds) {
  const auto& [tried, hosts] = GetParam();
  run_large({.hosts = hosts}, tried.run);
}
const auto k_name = [](const auto& info) {
  return std::get<0>(info.param).name + "_" + std::get<1>(info.param);
};
const auto k_hosts = ::testing::Values("ab", "aabb", "abca");
INSTANTIATE_TEST_SUITE_P(pairs, large_channel,
                         ::testing::Combine(::testing::ValuesIn(channel_cases()), k_hosts), k_name);
INSTANTIATE_TEST_SUITE_P(all, large_channel,
                         ::testing::Combine(::testing::ValuesIn(channel_collective_cases()),
                                            k_hosts),
                         k_name);

// --- which way ----------------------------------------------------------------------------------

/// Rank 0 puts `bytes` to rank 1, which says what it received.
void put_once(const rank_context& at, std::size_t bytes,
              const std::function<void(const channel_bench&)>& check) {
  channel_bench b(at);
  b.clear_words(0, 1);
  if (b.me() == 0) {
    b.write(64_KiB, bytes, 3);
    b.channel.put_signal({1}, 64_KiB, b.part(64_KiB, bytes), {0, 1}, b.stream);
  } else {
    b.channel.wait_signal({0}, {0, 1}, b.stream);
    b.channel.synchronize(b.stream);
    EXPECT_TRUE(b.holds(64_KiB, bytes, 3));
  }
  b.channel.synchronize(b.stream);
  check(b);
  b.finish();
}

TEST(large_transfers, what_is_large_goes_by_them_and_the_rest_in_messages) {
  run_large({}, [](const rank_context& at) {
    put_once(at, 100'000, [](const channel_bench& b) {
      const channel_statistics counts = b.channel.statistics();
      EXPECT_EQ(counts.large, "NCCL send and receive");
      EXPECT_EQ(counts.link_bytes, b.me() == 0 ? 100'000u : 0u);
      EXPECT_EQ(counts.large_bytes, b.me() == 0 ? 100'000u : 0u);
      EXPECT_EQ(counts.link_bytes_received, b.me() == 1 ? 100'000u : 0u);
      // The request of one side; three pieces cleared, and that they came, of the other.
      EXPECT_EQ(counts.link_messages, b.me() == 0 ? 1u : 4u);
    });
  });
  run_large({}, [](const rank_context& at) {
    put_once(at, 8_KiB - 1, [](const channel_bench& b) {
      EXPECT_EQ(b.channel.statistics().large_bytes, 0u);
      EXPECT_EQ(b.channel.statistics().link_messages, b.me() == 0 ? 1u : 0u);
    });
  });
}

TEST(large_transfers, a_rank_that_leaves_them_to_messages_says_so_for_all) {
  run_large({.links = {k_link, {.large = 0}}}, [](const rank_context& at) {
    put_once(at, 100'000, [](const channel_bench& b) {
      EXPECT_EQ(b.channel.statistics().large, "");
      EXPECT_EQ(b.channel.statistics().large_bytes, 0u);
    });
  });
}

TEST(large_transfers, memory_that_kernels_do_not_reach_goes_in_messages) {
  run_large({}, [](const rank_context& outer) {
    rank_context at = outer;
    at.on = std::make_shared<unreached>(outer.on);
    put_once(at, 100'000, [](const channel_bench& b) {
      EXPECT_EQ(b.channel.statistics().large, "NCCL send and receive");
      EXPECT_EQ(b.channel.statistics().large_bytes, 0u);
    });
  });
}

// --- no circle ----------------------------------------------------------------------------------

/// Everybody puts to everybody and gets from everybody, on streams that do not wait for each other.
TEST(large_transfers, whoever_moves_what_to_whom_none_waits_in_a_circle) {
  run_large({.hosts = "abcdef"}, [](const rank_context& at) {
    channel_bench b(at);
    const auto n = static_cast<std::size_t>(b.ranks());
    const auto me = static_cast<std::size_t>(b.me());
    const std::size_t slot = 2 * at.granule() / (2 * n);
    std::vector<native_stream> streams;
    for (int i = 0; i < 4; ++i) streams.push_back(at.on->create_stream(at.device));
    std::mt19937 random(static_cast<unsigned>(me));
    for (std::uint64_t round = 1; round <= 8; ++round) {
      // The first half of a part is this rank's own, the second what others put there.
      b.write(0, n * slot, seed_of(round, b.me(), 0));
      at.ranks->barrier("test: written");
      std::vector<std::vector<std::byte>> got(n, std::vector<std::byte>(n * slot));
      for (std::size_t i = 1; i < n; ++i) {
        const std::size_t peer = (me + i) % n;
        const rank_id to{static_cast<int>(peer)};
        b.channel.put(to, (n + me) * slot, b.part(peer * slot, slot), streams[random() % 4]);
        b.channel.get(to, 0, got[peer], streams[random() % 4]);
      }
      for (const native_stream each : streams) b.channel.synchronize(each);
      at.ranks->barrier("test: moved");
      for (std::size_t peer = 0; peer < n; ++peer) {
        if (peer == me) continue;
        EXPECT_TRUE(holds_pattern(*at.on, reinterpret_cast<address>(got[peer].data()), n * slot,
                                  seed_of(round, static_cast<int>(peer), 0), at.device));
        std::vector<std::byte> sent(slot);
        at.on->copy(reinterpret_cast<address>(sent.data()), b.own((n + peer) * slot), slot,
                    b.stream);
        at.on->synchronize(b.stream);
        const auto part = std::span(got[peer]).subspan(me * slot, slot);
        EXPECT_TRUE(std::equal(sent.begin(), sent.end(), part.begin())) << "from rank " << peer;
      }
      at.ranks->barrier("test: compared");
    }
    EXPECT_EQ(b.channel.statistics().large_bytes, b.channel.statistics().link_bytes);
    for (const native_stream each : streams) at.on->destroy_stream(each);
    b.finish();
  });
}

/// Puts of all sizes to one place, one after the other, and a get of it: the last one is there.
TEST(large_transfers, what_a_stream_puts_comes_in_its_order_whatever_its_size) {
  run_large({.hosts = "abc"}, [](const rank_context& at) {
    channel_bench b(at);
    const auto n = static_cast<std::size_t>(b.ranks());
    const auto me = static_cast<std::size_t>(b.me());
    constexpr std::size_t most = 200'000;
    std::mt19937 random(static_cast<unsigned>(me));
    b.clear_words(3_MiB, 2 * n);
    // Sources are changed as soon as the stream allows.
    std::vector<std::vector<std::byte>> got(n, std::vector<std::byte>(most));
    for (std::uint64_t round = 1; round <= 40; ++round) {
      for (std::size_t i = 1; i < n; ++i) {
        const std::size_t peer = (me + i) % n;
        const rank_id to{static_cast<int>(peer)};
        const std::size_t place = (1 + me) * 256_KiB;
        std::size_t bytes = 0;
        std::byte last{};
        std::vector<std::byte> expected(most);
        for (int turn = 0; turn < 4; ++turn) {
          bytes = random() % 2 == 0 ? random() % 8_KiB : random() % most;
          last = static_cast<std::byte>(random());
          std::fill_n(expected.begin(), bytes, last);
          if (turn == 0) {
            at.on->fill(b.own(0), std::byte{0}, most, b.stream);
            b.channel.put(to, place, b.part(0, most), b.stream);
          }
          at.on->fill(b.own(0), last, bytes, b.stream);
          if (turn < 3) {
            b.channel.put(to, place, b.part(0, bytes), b.stream);
          } else {
            b.channel.put_signal(to, place, b.part(0, bytes), {3_MiB + 8 * me, round}, b.stream);
          }
        }
        b.channel.get(to, place, got[peer], b.stream);
        b.channel.synchronize(b.stream);
        EXPECT_TRUE(got[peer] == expected) << "round " << round;
      }
      b.channel.barrier(b.stream);
    }
    b.finish();
  });
}

// --- peers that are lost, and an NCCL that fails
// --------------------------------------------------

/// Ranks with a channel each; rank 1 loses its at some point. What rank 0's says is checked.
void expect_loss(const large_job& job, const std::function<void(channel_bench&)>& rank_0,
                 const std::function<void(std::optional<channel_bench>&)>& rank_1,
                 const testing::Matcher<std::string>& says) {
  run_large(job, [&](const rank_context& at) {
    std::optional<channel_bench> b(std::in_place, at);
    at.ranks->barrier("test: both are there");
    if (at.ranks->rank() == rank_id{1}) rank_1(b);
    at.ranks->barrier("test: rank 1 is gone");
    if (at.ranks->rank() == rank_id{0}) {
      at.ranks->set_timeout(milliseconds(300));
      rank_0(*b);
      EXPECT_THAT(thrown_by([&] { b->channel.synchronize(b->stream); }), says);
      EXPECT_TRUE(at.on->idle(b->stream)) << "the stream was let go";
      at.ranks->set_timeout(job.timeout);
    }
    at.ranks->barrier("test: rank 0 has seen it");
  });
}
const auto k_put = [](channel_bench& b) { b.channel.put({1}, 0, b.part(0, 100'000), b.stream); };

TEST(large_transfers, a_put_that_nobody_takes_names_its_rank) {
  expect_loss(
      {}, k_put, [](auto& b) { b.reset(); },
      StartsWith("timed_out: rank 1 has not taken a put of 97.7 KiB within 0.3 s"));
}

TEST(large_transfers, a_get_that_nobody_sends_names_its_rank) {
  std::vector<std::byte> into(100'000);
  expect_loss(
      {}, [&](channel_bench& b) { b.channel.get({1}, 0, into, b.stream); },
      [](auto& b) { b.reset(); },
      StartsWith("timed_out: rank 1 did not answer a get of 97.7 KiB within 0.3 s"));
}

/// Of a sender: it has asked. Of a receiver: it has begun to receive, and told who asked.
void wait_until_it_spoke(const channel_bench& of) {
  while (of.channel.statistics().link_messages == 0) std::this_thread::yield();
}

TEST(large_transfers, one_that_asked_to_send_and_is_gone_is_named) {
  expect_loss(
      {.deaf = 1},
      [](channel_bench& b) {
        wait_until_it_spoke(b);
        b.channel.wait_signal({1}, {2_MiB, 1}, b.stream);
      },
      [](auto& b) {
        // It asks, and rank 0 begins to receive, but nothing is sent.
        b->channel.put({0}, 0, b->part(0, 100'000), b->stream);
        wait_until_it_spoke(*b);
        b.reset();
      },
      StartsWith("timed_out: rank 1 did not send 39.1 KiB within 0.3 s"));
}

TEST(large_transfers, who_is_in_line_behind_one_that_is_gone_is_not_blamed) {
  std::vector<std::byte> into(100'000);
  expect_loss(
      {.hosts = "abc", .deaf = 1},
      [&](channel_bench& b) {
        wait_until_it_spoke(b);
        b.channel.get({2}, 0, into, b.stream);
      },
      [](auto& b) {
        b->channel.put({0}, 0, b->part(0, 100'000), b->stream);
        wait_until_it_spoke(*b);
        b.reset();
      },
      StartsWith("timed_out: rank 1 did not send 39.1 KiB within 0.3 s"));
}

TEST(large_transfers, what_nccl_fails_with_breaks_the_channel) {
  const auto put_failing = [](int rank) {
    return [rank](channel_bench& b) {
      const fake_nccl_settings failing = {.fail_rank = rank, .fail_transfer = 1};
      fake_nccl_configure(&failing);
      k_put(b);
    };
  };
  expect_loss(
      {}, put_failing(0), [](auto&) {}, StartsWith("driver_error: ncclSend: error"));
  expect_loss(
      {}, put_failing(1), [](auto&) {},
      StartsWith("timed_out: rank 1 has not taken a put of 97.7 KiB"));
}

TEST(large_transfers, a_communicator_that_does_not_start_fails_the_channel_on_all_ranks) {
  run_large({.timeout = milliseconds(3000)}, [](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    const auto link = at.link();
    at.ranks->barrier("test: linked");
    if (at.ranks->rank() == rank_id{0}) {
      const fake_nccl_settings failing = {.fail_rank = 1, .fail_init = 1};
      fake_nccl_configure(&failing);
    }
    at.ranks->barrier("test: set to fail");
    EXPECT_THAT(thrown_by([&] { symmetric_channel(region, {.link = link}); }),
                HasSubstr("ncclCommInitRankConfig"));
    region.close();
  });
}

/// Rank 1 fails at one call after the other until it has all that they need.
TEST(large_transfers, a_rank_that_cannot_have_them_fails_the_channel_on_all) {
  run_large({}, [](const rank_context& at) {
    const auto faulty = fault_driver::make(at.on);
    symmetric_region region(at.ranks, faulty, {.reserve = 64_MiB});
    region.grow(tier::device, at.granule());
    const nccl_communicator nccl(at.ranks, faulty);
    const auto link = make_nccl_link(nccl, at.ranks->make_link(), k_link);
    const bool fails = at.ranks->rank() == rank_id{1};
    for (const driver_call kind : {driver_call::create_stream, driver_call::create_event}) {
      for (std::size_t nth = 0;; ++nth) {
        if (fails) faulty->fail_call(kind, nth);
        std::optional<symmetric_channel> made;
        const auto said =
            thrown_by_all(*at.ranks, [&] { made.emplace(region, channel_options{.link = link}); });
        const bool failed = at.ranks->all_gather_value(fails && faulty->disarm())[1];
        if (made) made->close();
        if (!failed) {
          EXPECT_EQ(said, "");
          break;
        }
        EXPECT_THAT(said, HasSubstr("fails because a test said so"));
      }
    }
    region.close();
  });
}

TEST(large_transfers, pieces_of_nothing_are_refused) {
  run_large({}, [](const rank_context& at) {
    nccl_communicator nccl(at.ranks, at.on);
    const auto link = [&](const nccl_link_options& options) {
      return thrown_by([&] { make_nccl_link(nccl, at.ranks->make_link(), options); });
    };
    EXPECT_THAT(link({.large_piece = 0}),
                StartsWith("invalid_argument: nccl_link_options::large_piece is 0"));
    EXPECT_EQ(link({.large = 0, .large_piece = 0}), "");
    nccl.close();
  });
}

}  // namespace
}  // namespace evmm::test
