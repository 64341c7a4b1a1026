// SPDX-License-Identifier: Apache-2.0
#include "comm/message_head.hpp"
#include "comm/thread_link.hpp"
#include "comm/wire.hpp"
#include "tests/support/thread_hosts.hpp"

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace evmm::test {
namespace {

/// Remembers to whom messages went.
class remembering_link final : public thread_link {
 public:
  using thread_link::thread_link;
  transfer send(rank_id to, std::span<const std::byte> message) override {
    const std::lock_guard lock(mutex_);
    sent_to_.push_back(to.value);
    return thread_link::send(to, message);
  }
  std::vector<int> sent_to() const {
    const std::lock_guard lock(mutex_);
    return sent_to_;
  }

 private:
  mutable std::mutex mutex_;
  std::vector<int> sent_to_;
};

/// Two gets of rank 0's part lie there when its channel begins, a large one and then a small one.
TEST(channel_answers, go_by_turns) {
  const auto office = std::make_shared<post_office>(3);
  const auto elsewhere = std::make_shared<post_office>(3);  // where nobody gets the answers
  const auto ask = [&](rank_id from, std::size_t bytes) {
    const message_head head{.what = message_head::get, .bytes = bytes, .id = 1};
    office->post({0}, {from, wire_writer().put(head).take()});
  };
  ask({1}, 20'000);
  ask({2}, 100);
  const auto link = std::make_shared<remembering_link>(rank_id{0}, office);
  run_hosts("abc", [&](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::device, at.granule());
    const rank_id me = at.ranks->rank();
    std::shared_ptr<node_link> mine = link;
    if (me != rank_id{0}) mine = std::make_shared<thread_link>(me, elsewhere);
    const symmetric_channel channel(region, {.link = std::move(mine), .chunk_bytes = 4096});
    if (me == rank_id{0}) {
      while (link->sent_to().size() < 6) std::this_thread::yield();
      EXPECT_THAT(link->sent_to(), testing::ElementsAre(1, 2, 1, 1, 1, 1));
    }
    at.ranks->barrier("test: all is answered");
  });
}

}  // namespace
}  // namespace evmm::test
