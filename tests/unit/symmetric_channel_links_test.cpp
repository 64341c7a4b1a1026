// SPDX-License-Identifier: Apache-2.0
// Links that are given to a channel: one channel at a time, and those that exchange by themselves.
#include "comm/thread_link.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/symmetric_cases.hpp"
#include "tests/support/thread_hosts.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/error.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

/// A link that exchanges in stream order, as NCCL would: the ranks' streams meet, and each takes
/// what the others hold out.
class exchanging_link final : public thread_link {
 public:
  struct board {
    explicit board(int ranks)
        : base(static_cast<std::size_t>(ranks)), out(base.size()), meeting(ranks) {}
    std::vector<std::byte*> base;
    std::vector<std::vector<node_exchange::block>> out;
    std::barrier<> meeting;
    std::atomic<int> exchanges = 0;
  };
  exchanging_link(rank_id rank, std::shared_ptr<post_office> office, std::shared_ptr<board> where)
      : thread_link(rank, std::move(office)), board_(std::move(where)) {}

  std::unique_ptr<node_exchange> make_exchange(symmetric_region& region) override {
    return std::make_unique<by_meeting>(region, board_);
  }

 private:
  class by_meeting final : public node_exchange {
   public:
    by_meeting(symmetric_region& region, std::shared_ptr<board> where)
        : me_(static_cast<std::size_t>(region.ranks().rank().value)),
          on_(region.on()),
          board_(std::move(where)) {
      board_->base[me_] = region.local();
    }
    std::string way() const override { return "meetings"; }
    void exchange(std::span<const block> out, std::span<const block> in,
                  native_stream stream) override {
      on_.launch(stream, [this, mine = std::vector(out.begin(), out.end()),
                          wanted = std::vector(in.begin(), in.end())] {
        board_->out[me_] = mine;
        board_->meeting.arrive_and_wait();
        for (const block& into : wanted) {
          const auto peer = static_cast<std::size_t>(into.peer.value);
          for (const block& from : board_->out[peer]) {
            if (from.peer.value != static_cast<int>(me_)) continue;
            EXPECT_EQ(from.bytes, into.bytes);
            EXPECT_EQ(from.to, into.at);
            std::memcpy(board_->base[me_] + into.at, board_->base[peer] + from.at, from.bytes);
          }
        }
        board_->meeting.arrive_and_wait();
        ++board_->exchanges;
      });
    }

   private:
    std::size_t me_;
    driver& on_;
    std::shared_ptr<board> board_;
  };

  std::shared_ptr<board> board_;
};

/// Messages say to which part of which rank they go, not over which region.
TEST(symmetric_channel, a_link_carries_one_channel_at_a_time) {
  const auto office = std::make_shared<post_office>(2);
  run_hosts("ab", [&](const rank_context& at) {
    auto first = at.make();
    auto second = at.make();
    for (symmetric_region* each : {&first, &second}) each->grow(tier::device, at.granule());
    const channel_options options{.link = std::make_shared<thread_link>(at.ranks->rank(), office)};
    const auto refused = [&] {
      return thrown_by_all(*at.ranks, [&] { symmetric_channel(second, options); });
    };
    symmetric_channel channel(first, options);
    EXPECT_EQ(refused().find("invalid_argument: rank 0: the link threads is in use"), 0u)
        << refused();
    channel.close();
    std::optional<symmetric_channel> next(std::in_place, second, options);
    EXPECT_NE(refused(), "");
    at.ranks->barrier("test: refused");
    next.reset();
    EXPECT_EQ(refused(), "") << "one that is gone has it no more";
    next.emplace(second, options);
    const native_stream stream = at.on->create_stream(at.device);
    next->signal({1 - at.ranks->rank().value}, {0, 1}, stream);
    next->synchronize(stream);
    next.reset();
    at.on->destroy_stream(stream);
    const std::string said = refused();
    EXPECT_NE(said.find("was by a channel that sent and was not closed"), std::string::npos)
        << said;
  });
}

TEST(symmetric_channel, a_link_that_exchanges_takes_the_far_part_of_an_all_to_all) {
  constexpr int ranks = 4;
  const auto office = std::make_shared<post_office>(ranks);
  const auto board = std::make_shared<exchanging_link::board>(ranks);
  run_hosts("aabb", [&](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    const rank_id me = at.ranks->rank();
    symmetric_channel channel(region,
                              {.link = std::make_shared<exchanging_link>(me, office, board)});
    const native_stream stream = at.on->create_stream(at.device);
    write_pattern(*at.on, reinterpret_cast<address>(region.local()), 4096,
                  static_cast<std::uint64_t>(me.value));
    std::vector<outgoing_block> out;
    std::vector<incoming_block> in;
    for (std::size_t r = 0; r < ranks; ++r) {
      out.push_back(
          {.from = 0, .to = 4096 * (1 + static_cast<std::size_t>(me.value)), .bytes = 4096});
      in.push_back({.at = 4096 * (1 + r), .bytes = 4096});
    }
    channel.all_to_all_v(out, in, stream);
    channel.synchronize(stream);
    for (std::size_t r = 0; r < ranks; ++r) {
      EXPECT_TRUE(
          holds_pattern(*at.on, reinterpret_cast<address>(region.local()) + in[r].at, 4096, r));
    }
    EXPECT_EQ(channel.statistics().link_messages, 0u);
    EXPECT_EQ(channel.statistics().link_bytes, 2 * 4096u);
    EXPECT_EQ(channel.statistics().exchange, "meetings");
    at.on->destroy_stream(stream);
    channel.close();
    region.close();
  });
  EXPECT_EQ(board->exchanges, ranks);
}

}  // namespace
}  // namespace evmm::test
