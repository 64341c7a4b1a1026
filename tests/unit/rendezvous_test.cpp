// SPDX-License-Identifier: Apache-2.0
// The line of large puts at one receiver, with transfers that end when the test says so.
#include "comm/rendezvous.hpp"

#include "tests/support/thread_ranks.hpp"

#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;
using std::chrono::milliseconds;
using testing::ElementsAre;
using testing::HasSubstr;

class held_transfers final : public large_transfers {
 public:
  std::string way() const override { return "held"; }
  std::size_t least() const override { return 1; }
  std::size_t most() const override { return 1_MiB; }
  transfer send(rank_id, address, std::size_t, native_event) override { return {}; }
  transfer receive(rank_id from, address, std::size_t, native_event) override {
    received_from.push_back(from);
    return {};
  }
  bool done(transfer) override { return std::exchange(over, false); }
  void give_up() noexcept override {}

  bool over = false;
  std::vector<rank_id> received_from;
};

/// One rank's side of the line.
struct side {
  side() : stream(on->create_stream({0})) {}
  ~side() {
    line.reset();
    on->destroy_stream(stream);
  }
  side(const side&) = delete;
  side& operator=(const side&) = delete;

  /// Heads of one kind said so far, by whom they are for.
  std::vector<rank_id> told(message_head::kind what) const {
    std::vector<rank_id> ranks;
    for (const auto& [to, head] : said) {
      if (head.what == what) ranks.push_back(to);
    }
    return ranks;
  }

  std::shared_ptr<driver> on = host_driver::make({});
  std::shared_ptr<held_transfers> by = std::make_shared<held_transfers>();
  native_stream stream;
  own_parts own;
  std::vector<std::pair<rank_id, message_head>> said;
  std::optional<rendezvous> line{
      std::in_place,
      *on,
      device_id{0},
      by,
      own,
      stream,
      [this](rank_id to, const message_head& head) { said.emplace_back(to, head); }};
};

message_head request(std::uint64_t id, std::size_t bytes) {
  return {.what = message_head::request_to_send, .bytes = bytes, .id = id};
}

TEST(rendezvous, tells_ranks_in_line_that_it_moves) {
  side receiver;
  constexpr milliseconds patience{1000};
  const auto begun = rendezvous::clock::now();
  for (const int rank : {1, 2, 3, 3}) receiver.line->on_request_to_send({rank}, request(1, 2_MiB));
  receiver.line->advance();
  receiver.line->reassure(begun + patience, patience);
  EXPECT_THAT(receiver.told(message_head::in_line), ElementsAre()) << "nothing moved yet";
  receiver.by->over = true;
  receiver.line->advance();
  receiver.line->reassure(begun + patience, patience);
  EXPECT_THAT(receiver.told(message_head::in_line), ElementsAre(rank_id{1}, rank_id{3}))
      << "once each; and 2 is being received";
  receiver.by->over = true;
  receiver.line->advance();
  receiver.line->reassure(begun + patience + patience / 8, patience);
  EXPECT_EQ(receiver.told(message_head::in_line).size(), 2u) << "not again so soon";
  receiver.line->reassure(begun + 2 * patience, patience);
  EXPECT_EQ(receiver.told(message_head::in_line).size(), 5u);
  receiver.line->reassure(begun + 9 * patience, patience);
  EXPECT_EQ(receiver.told(message_head::in_line).size(), 5u) << "it stands still";
}

TEST(rendezvous, a_put_in_line_is_late_only_when_nothing_is_heard_of_it) {
  side sender;
  constexpr milliseconds patience{1000};
  std::size_t left = 0;
  const auto begun = rendezvous::clock::now();
  sender.line->put({.to = {1}, .bytes = 2_MiB, .large = true}, left);
  const auto put = rendezvous::clock::now();
  EXPECT_THAT(thrown_by([&] { sender.line->check_deadlines(put + patience, patience); }),
              HasSubstr("timed_out: rank 1 has not taken a put of 2.0 MiB"));
  while (rendezvous::clock::now() < put + milliseconds(20)) {
  }
  sender.line->on_in_line({2});
  EXPECT_THAT(thrown_by([&] { sender.line->check_deadlines(put + patience, patience); }),
              HasSubstr("rank 1"))
      << "another rank's line";
  sender.line->on_in_line({1});
  EXPECT_EQ(thrown_by([&] { sender.line->check_deadlines(put + patience, patience); }), "");
  EXPECT_THAT(thrown_by([&] { sender.line->check_deadlines(begun + 3 * patience, patience); }),
              HasSubstr("rank 1"));
}

/// As a rank of whose part others get large pieces has it: they leave in the order of their coming.
TEST(rendezvous, tells_ranks_that_it_sends_to_that_their_turn_comes) {
  side owner;
  owner.own.data.size = 8_MiB;
  constexpr milliseconds patience{1000};
  const auto begun = rendezvous::clock::now();
  for (const int rank : {1, 2, 3}) {
    owner.line->on_clear_to_send({rank}, {.what = message_head::clear_to_send, .bytes = 1_MiB});
  }
  const auto asked = rendezvous::clock::now();
  owner.line->advance();
  owner.line->reassure(begun + patience, patience);
  EXPECT_THAT(owner.told(message_head::in_line), ElementsAre()) << "nothing moved yet";
  EXPECT_THAT(thrown_by([&] { owner.line->check_deadlines(asked + patience, patience); }),
              HasSubstr("timed_out: rank 1 did not receive 1.0 MiB"));
  while (rendezvous::clock::now() < asked + milliseconds(20)) {
  }
  owner.by->over = true;
  owner.line->advance();
  EXPECT_EQ(thrown_by([&] { owner.line->check_deadlines(asked + patience, patience); }), "");
  owner.line->reassure(begun + patience, patience);
  EXPECT_THAT(owner.told(message_head::in_line), ElementsAre(rank_id{2}, rank_id{3}));
  owner.line->reassure(begun + 9 * patience, patience);
  EXPECT_EQ(owner.told(message_head::in_line).size(), 2u) << "it stands still";
  EXPECT_THAT(thrown_by([&] { owner.line->check_deadlines(begun + 3 * patience, patience); }),
              HasSubstr("rank 2 did not receive"));
}

TEST(rendezvous, a_get_is_late_only_when_nothing_is_heard_of_it) {
  side asker;
  constexpr milliseconds patience{1000};
  far_get wanted{.from = {1}, .into = 4096, .bytes = 1_MiB, .large = true};
  asker.line->get(wanted);
  const auto begun = rendezvous::clock::now();
  asker.line->advance();
  const auto asked = rendezvous::clock::now();
  const auto late = [&](rendezvous::clock::time_point now) {
    return thrown_by([&] { asker.line->check_deadlines(now, patience); });
  };
  EXPECT_THAT(late(asked + patience), HasSubstr("timed_out: rank 1 did not answer a get"));
  while (rendezvous::clock::now() < asked + milliseconds(20)) {
  }
  asker.line->on_in_line({2});
  EXPECT_THAT(late(asked + patience), HasSubstr("rank 1")) << "another rank's line";
  asker.line->on_in_line({1});
  EXPECT_EQ(late(asked + patience), "");
  EXPECT_THAT(late(begun + 3 * patience), HasSubstr("rank 1"));
}

}  // namespace
}  // namespace evmm::test
