// SPDX-License-Identifier: Apache-2.0
// Exchanges by one-sided puts, carried out by threads in place of GIN's kernels.
#include "comm/put_exchange.hpp"

#include "comm/thread_link.hpp"
#include "tests/support/channel_bench.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/host_driver.hpp>

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

namespace evmm::test {
namespace {

using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::StartsWith;
using block = node_exchange::block;
using what = put_step::what;

// --- the plan -----------------------------------------------------------------------------------

std::string text_of(const std::vector<put_step>& steps) {
  std::string text;
  for (const put_step& each : steps) {
    switch (each.kind) {
      case what::announce:
        text += fmt::format("announce {}; ", each.peer);
        break;
      case what::put:
        text += fmt::format("put {} when {}: {} from {} to {}; ", each.peer, each.value, each.bytes,
                            each.from, each.to);
        break;
      case what::await:
        text += fmt::format("await {} from {}; ", each.value, each.peer);
        break;
    }
  }
  return text;
}

TEST(put_plan, announces_before_it_puts_and_puts_before_it_awaits) {
  put_plan plan(4);
  const std::vector<block> out = {{.peer = {2}, .at = 64, .bytes = 8, .to = 128},
                                  {.peer = {3}, .at = 72, .bytes = 16, .to = 256}};
  const std::vector<block> in = {{.peer = {3}, .at = 512, .bytes = 24}};
  EXPECT_EQ(text_of(plan.next(out, in)),
            "announce 3; put 2 when 1: 8 from 64 to 128; put 3 when 1: 16 from 72 to 256; "
            "await 1 from 3; ");
}

TEST(put_plan, a_signal_counts_the_blocks_of_one_pair_in_one_direction) {
  put_plan plan(3);
  const std::vector<block> to_1 = {{.peer = {1}, .bytes = 8}};
  const std::vector<block> from_2 = {{.peer = {2}, .bytes = 8}};
  EXPECT_EQ(text_of(plan.next(to_1, {})), "put 1 when 1: 8 from 0 to 0; ");
  EXPECT_EQ(text_of(plan.next({}, {})), "");
  EXPECT_EQ(text_of(plan.next({}, from_2)), "announce 2; await 1 from 2; ");
  EXPECT_EQ(text_of(plan.next(to_1, from_2)),
            "announce 2; put 1 when 2: 8 from 0 to 0; await 2 from 2; ");
}

TEST(put_plan, each_rank_has_two_signals_of_its_own) {
  std::vector<int> used(static_cast<std::size_t>(put_signals(5)));
  for (int peer = 0; peer < 5; ++peer) {
    ++used.at(ready_signal(peer));
    ++used.at(data_signal(peer));
  }
  EXPECT_EQ(used, std::vector<int>(10, 1));
}

// --- threads in place of kernels ----------------------------------------------------------------

/// What ranks put to each other through: their parts and their signals.
struct fabric {
  struct part {
    std::byte* base = nullptr;
    std::vector<std::atomic<std::uint64_t>> signals;
  };
  explicit fabric(int ranks) : parts(static_cast<std::size_t>(ranks)) {
    for (part& each : parts) {
      each.signals =
          std::vector<std::atomic<std::uint64_t>>(static_cast<std::size_t>(put_signals(ranks)));
    }
  }
  part& of(int rank) { return parts[static_cast<std::size_t>(rank)]; }
  std::vector<part> parts;
  std::atomic<int> puts = 0;
  std::atomic<bool> down = false;
};

/// Does what the kernel does, three steps to a launch.
class thread_port final : public put_port {
 public:
  thread_port(symmetric_region& region, std::shared_ptr<fabric> over)
      : me_(region.ranks().rank().value), on_(region.on()), over_(std::move(over)) {
    over_->of(me_).base = region.local();
  }

  std::string name() const override { return "threads' puts"; }
  std::string why_down() const override { return over_->down ? "a test said so" : ""; }
  std::optional<rank_id> late() const override {
    return late_ < 0 ? std::nullopt : std::optional(rank_id{late_});
  }
  void carry_out(std::span<const put_step> steps, milliseconds patience,
                 native_stream stream) override {
    for (std::size_t i = 0; i < steps.size(); i += 3) {
      const auto some = steps.subspan(i, std::min<std::size_t>(3, steps.size() - i));
      on_.launch(stream, [this, patience, mine = std::vector(some.begin(), some.end())] {
        for (const put_step& each : mine) step(each, patience);
      });
    }
  }

 private:
  void raise(int peer, std::uint32_t signal) { ++over_->of(peer).signals[signal]; }
  bool came(std::uint32_t signal, const put_step& each, milliseconds patience) {
    const auto until = std::chrono::steady_clock::now() + patience;
    while (over_->of(me_).signals[signal] < each.value) {
      if (late_ >= 0) return false;
      if (std::chrono::steady_clock::now() > until) {
        late_ = each.peer;
        return false;
      }
      std::this_thread::yield();
    }
    return true;
  }
  void step(const put_step& each, milliseconds patience) {
    if (each.kind == what::announce) raise(each.peer, ready_signal(me_));
    if (each.kind == what::await) came(data_signal(each.peer), each, patience);
    if (each.kind != what::put || !came(ready_signal(each.peer), each, patience)) return;
    std::memcpy(over_->of(each.peer).base + each.to, over_->of(me_).base + each.from, each.bytes);
    ++over_->puts;
    raise(each.peer, data_signal(me_));
  }

  int me_;
  driver& on_;
  std::shared_ptr<fabric> over_;
  std::atomic<int> late_ = -1;
};

/// The other way: takes calls down, and moves nothing.
class idle_exchange final : public node_exchange {
 public:
  explicit idle_exchange(std::atomic<int>& calls) : calls_(calls) {}
  std::string way() const override { return "the other way"; }
  void exchange(std::span<const block>, std::span<const block>, native_stream) override {
    ++calls_;
  }

 private:
  std::atomic<int>& calls_;
};

class putting_link final : public thread_link {
 public:
  putting_link(rank_id rank, std::shared_ptr<post_office> office, std::shared_ptr<fabric> over,
               std::atomic<int>& otherwise)
      : thread_link(rank, std::move(office)), over_(std::move(over)), otherwise_(otherwise) {}
  std::unique_ptr<node_exchange> make_exchange(symmetric_region& region) override {
    return std::make_unique<put_exchange>(region, std::make_unique<thread_port>(region, over_),
                                          std::make_unique<idle_exchange>(otherwise_));
  }

 private:
  std::shared_ptr<fabric> over_;
  std::atomic<int>& otherwise_;
};

/// Ranks as threads on pretended hosts, whose channels exchange by puts.
class put_exchange_threads : public ::testing::Test {
 protected:
  void run(const std::string& hosts,
           const std::function<void(const rank_context&, const channel_options&)>& body) {
    const int ranks = static_cast<int>(hosts.size());
    over = std::make_shared<fabric>(ranks);
    const auto office = std::make_shared<post_office>(hosts.size());
    std::vector<std::string> names;
    for (const char host : hosts) names.emplace_back(1, host);
    const auto bootstraps = make_thread_bootstraps(ranks, names);
    for (const auto& each : bootstraps) each->set_timeout(milliseconds(20'000));
    const auto thrown = run_ranks(ranks, [&](int rank) {
      body({.ranks = bootstraps[static_cast<std::size_t>(rank)],
            .on = host_driver::make({.device_bytes = 1_GiB, .host_bytes = 4_GiB})},
           {.link = std::make_shared<putting_link>(rank_id{rank}, office, over, other_way)});
    });
    for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
  }
  static std::string what(const std::exception_ptr& failure) { return test::what(failure); }

  std::shared_ptr<fabric> over;
  std::atomic<int> other_way = 0;
};

TEST_F(put_exchange_threads, blocks_go_to_their_places_round_after_round) {
  for (const char* const hosts : {"ab", "aabb", "abc", "abcdefgh"}) {
    run(hosts, [](const rank_context& at, const channel_options& options) {
      run_skewed_all_to_all(at, options);
    });
    EXPECT_GT(over->puts, 0) << hosts;
  }
  EXPECT_EQ(other_way, 0);
}

TEST_F(put_exchange_threads, no_block_is_written_before_its_receivers_stream_is_there) {
  run("ab", [](const rank_context& outer, const channel_options& options) {
    channel_bench b(outer, options);
    const bool sends = b.me() == 0;
    std::vector<outgoing_block> out(2);
    std::vector<incoming_block> in(2);
    if (sends) out[1] = {.from = 0, .to = 4096, .bytes = 4096};
    if (!sends) in[0] = {.at = 4096, .bytes = 4096};
    for (std::uint64_t round = 1; round <= 5; ++round) {
      b.write(0, 4096, round);
      b.write(4096, 4096, 100 + round);
      b.channel.synchronize(b.stream);
      outer.ranks->barrier("test: written");
      std::optional<stream_gate> gate;
      if (!sends) gate.emplace(*outer.on, b.stream);
      b.channel.all_to_all_v(out, in, b.stream);
      outer.ranks->barrier("test: called");
      if (!sends) {
        EXPECT_TRUE(b.holds(4096, 4096, 100 + round)) << "round " << round;
        gate->open();
      }
      b.channel.synchronize(b.stream);
      if (!sends) {
        EXPECT_TRUE(b.holds(4096, 4096, round)) << "round " << round;
      }
    }
    b.finish();
  });
}

TEST_F(put_exchange_threads, exchanges_on_several_streams_keep_the_order_of_the_calls) {
  run("ab", [](const rank_context& at, const channel_options& options) {
    channel_bench b(at, options);
    const native_stream other = at.on->create_stream(at.device);
    const std::size_t peer = 1 - static_cast<std::size_t>(b.me());
    const std::size_t half = at.granule();
    for (std::size_t i = 0; i < 16; ++i) b.write(i * 256, 256, seed_of(i, b.me(), 0));
    for (std::size_t i = 0; i < 16; ++i) {
      std::vector<outgoing_block> out(2);
      std::vector<incoming_block> in(2);
      out[peer] = {.from = i * 256, .to = half + i * 256, .bytes = 256};
      in[peer] = {.at = half + i * 256, .bytes = 256};
      b.channel.all_to_all_v(out, in, i % 2 == 0 ? b.stream : other);
    }
    b.channel.synchronize(b.stream);
    b.channel.synchronize(other);
    for (std::size_t i = 0; i < 16; ++i) {
      EXPECT_TRUE(b.holds(half + i * 256, 256, seed_of(i, static_cast<int>(peer), 0))) << i;
    }
    at.on->destroy_stream(other);
    b.finish();
  });
}

TEST_F(put_exchange_threads, a_rank_that_does_not_come_is_named_and_the_stream_goes_on) {
  run("ab", [](const rank_context& at, const channel_options& options) {
    channel_bench b(at, options);
    at.ranks->barrier("test: both are there");
    if (b.me() == 0) {
      at.ranks->set_timeout(milliseconds(200));
      const std::vector<outgoing_block> out = {{}, {.bytes = 64}};
      const std::vector<incoming_block> in = {{}, {.bytes = 64}};
      b.channel.all_to_all_v(out, in, b.stream);
      const std::string said = thrown_by([&] { b.channel.synchronize(b.stream); });
      EXPECT_THAT(said, StartsWith("timed_out: rank 1 did not come to an exchange by threads' puts "
                                   "within 0.2 s; help: "));
      EXPECT_EQ(thrown_by([&] { b.channel.barrier(b.stream); }), said) << "it stays broken";
      at.ranks->set_timeout(milliseconds(20'000));
    }
    at.ranks->barrier("test: rank 0 has seen it");
  });
}

TEST_F(put_exchange_threads, while_the_port_is_down_blocks_go_the_other_way) {
  run("ab", [&](const rank_context& at, const channel_options& options) {
    channel_bench b(at, options);
    const std::size_t peer = 1 - static_cast<std::size_t>(b.me());
    std::vector<outgoing_block> out(2);
    std::vector<incoming_block> in(2);
    out[peer] = {.from = 0, .to = 4096, .bytes = 64};
    in[peer] = {.at = 4096, .bytes = 64};
    for (const bool down : {false, true, false}) {
      at.ranks->barrier("test: next");
      over->down = down;
      at.ranks->barrier("test: said");
      b.channel.all_to_all_v(out, in, b.stream);
      EXPECT_EQ(b.channel.statistics().exchange,
                down ? "the other way; threads' puts is down: a test said so" : "threads' puts");
      b.channel.synchronize(b.stream);
    }
    b.finish();
  });
  EXPECT_EQ(other_way, 2);
  EXPECT_EQ(over->puts, 4);
}

TEST(put_exchange, one_reason_is_told_to_all) {
  const auto bootstraps = make_thread_bootstraps(4);
  const std::vector<std::vector<std::string>> rounds = {
      {"", "", "", ""}, {"", "", "no card", ""}, {"", "old", "no card", ""}};
  std::vector<std::vector<std::string>> told(rounds.size(), std::vector<std::string>(4));
  run_ranks(4, [&](int rank) {
    const auto r = static_cast<std::size_t>(rank);
    for (std::size_t i = 0; i < rounds.size(); ++i) {
      told[i][r] = agree_on_reason(*bootstraps[r], rounds[i][r], "test: reasons");
    }
  });
  EXPECT_THAT(told[0], ElementsAre("", "", "", ""));
  EXPECT_EQ(told[1], std::vector<std::string>(4, "rank 2: no card"));
  EXPECT_EQ(told[2], std::vector<std::string>(4, "rank 1: old"));
}

}  // namespace
}  // namespace evmm::test
