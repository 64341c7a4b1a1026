// SPDX-License-Identifier: Apache-2.0
// What goes wrong on one rank while windows are on: all ranks return or all throw the same, the
// windows are up on all or down on all, and nothing stays registered.
#include "tests/support/fault_driver.hpp"
#include "tests/support/nccl_ranks.hpp"

#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <functional>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using testing::AnyOf;
using testing::HasSubstr;

constexpr int k_ranks = 2;
/// Of steps that a rank waits out: short, and long enough for all ranks on two busy cores.
constexpr std::chrono::milliseconds k_deadline{1500};
constexpr rank_id k_victim{1};

struct change_case {
  std::string name;
  std::function<void(symmetric_region&)> act;
};

std::vector<change_case> changes() {
  return {
      {"grow", [](auto& region) { region.grow(tier::device, 2_MiB); }},
      {"shrink", [](auto& region) { region.shrink(2_MiB); }},
      {"migrate", [](auto& region) { region.migrate(1, tier::host); }},
      {"discard", [](auto& region) { region.discard(contents::backup); }},
      {"restore", [](auto& region) { region.restore(); }},
      {"compact", [](auto& region) { region.compact(); }},
  };
}

/// A region of D2 D2 D2 with a window over it, as `tried` needs it.
struct windowed {
  windowed(const rank_context& at, const std::string& tried)
      : region(at.make({.cache_limit = 0})), on(at.ranks, at.on) {
    for (int i = 0; i < 3; ++i) region.grow(tier::device, 2_MiB);
    window.emplace(on, region, k_whole);
    if (tried == "restore") region.discard(contents::backup);
  }
  symmetric_region region;
  nccl_communicator on;
  std::optional<nccl_window> window;
};

/// The same on all ranks.
template <class T>
void expect_equal(bootstrap& ranks, const T& mine) {
  for (const T& other : ranks.all_gather_value(mine, "test: compare")) EXPECT_EQ(other, mine);
}

class nccl_faults : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(versions, nccl_faults, testing::Values(22907, 23007),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(nccl_faults, a_change_that_fails_brings_the_windows_back) {
  const nccl_fixture fake({.version = GetParam()});
  int points = 0;
  run_nccl_ranks(k_ranks, [&](const rank_context& outer) {
    rank_context at = outer;
    const auto faulty = fault_driver::make(outer.on);
    at.on = faulty;
    const bool me = at.ranks->rank() == k_victim;
    for (const change_case& tried : changes()) {
      if (tried.name == "migrate" && GetParam() < 23003) continue;
      for (std::size_t nth = 0;; ++nth) {
        windowed made(at, tried.name);
        const auto before = layout(made.region);
        const bool was_up = made.window->why_down().empty();
        at.ranks->barrier();
        if (me) faulty->fail_call(nth);
        const auto said = thrown_by_all(*at.ranks, [&] { tried.act(made.region); });
        const bool injected =
            at.ranks->all_gather_value(std::uint8_t{me && faulty->disarm()})[k_victim.value] != 0;
        SCOPED_TRACE(tried.name + " " + std::to_string(nth) + ": " + said);
        if (!injected) {
          EXPECT_EQ(said, "");
          break;
        }
        if (me) ++points;
        if (said.empty()) continue;  // cured by a second attempt
        EXPECT_EQ(layout(made.region), before);
        EXPECT_EQ(made.window->why_down().empty(), was_up);
        if (was_up) {
          EXPECT_EQ(text_of(made.window->pieces()), GetParam() < 23003 ? "0+2 2+2 4+2" : "0+6");
          expect_peers_seen(made.on, made.region, *made.window, nth + 1);
        }
        tried.act(made.region);  // in step, and it can be done after all
        if (tried.name == "restore") expect_peers_seen(made.on, made.region, *made.window, nth + 2);
      }
    }
  });
  std::printf("%d failing points tried\n", points);
  EXPECT_GT(points, 20);
}

TEST_P(nccl_faults, a_registration_that_fails_after_a_change_leaves_the_change_and_no_window) {
  for (const auto how : {fake_failure::report, fake_failure::absent}) {
    for (const change_case& tried : changes()) {
      if (tried.name == "migrate" && GetParam() < 23003) continue;
      SCOPED_TRACE(tried.name);
      const nccl_fixture fake({.version = GetParam()});
      run_nccl_ranks(
          k_ranks,
          [&](const rank_context& at) {
            windowed made(at, tried.name);
            const auto epoch = made.region.epoch();
            at.ranks->barrier();
            const fake_nccl_settings failing{
                .version = GetParam(), .fail_rank = k_victim.value, .fail_register = how};
            if (at.ranks->rank() == rank_id{0}) fake_nccl_configure(&failing);
            at.ranks->barrier();
            EXPECT_EQ(thrown_by_all(*at.ranks, [&] { tried.act(made.region); }), "");
            EXPECT_EQ(made.region.epoch(), epoch + 1) << "the change holds";
            // What shrinks below 2.30.3 has nothing to register, nor has what sleeps.
            const bool registers =
                tried.name != "discard" && (tried.name != "shrink" || GetParam() >= 23003);
            expect_equal(*at.ranks, made.window->why_down().empty());
            if (!registers) return;
            EXPECT_EQ(made.window->pieces().size(), 0u);
            EXPECT_THAT(made.window->why_down(), HasSubstr("ncclCommWindowRegister"));
            EXPECT_THAT(thrown_by_all(*at.ranks, [&] { (void)made.window->at(0); }),
                        AnyOf(HasSubstr("broken"), HasSubstr("is down")));
            EXPECT_THAT(thrown_by([&] { (void)made.on.get(); }), HasSubstr("peer_error"))
                << "NCCL is out of step: no rank may go on with it";
            // The region goes on, and a new communicator has a window on it again.
            made.window.reset();
            if (tried.name == "discard") made.region.restore();
            nccl_communicator again(at.ranks, at.on);
            const nccl_window window(again, made.region, k_whole);
            expect_peers_seen(again, made.region, window, 3);
            made.region.grow(tier::device, 2_MiB);
            expect_peers_seen(again, made.region, window, 4);
          },
          k_deadline);
    }
  }
}

TEST_P(nccl_faults, a_window_that_cannot_be_made_is_made_on_no_rank) {
  for (const auto how : {fake_failure::report, fake_failure::absent}) {
    for (const int after : {0, 1, 2}) {
      const nccl_fixture fake({.version = GetParam(),
                               .fail_rank = k_victim.value,
                               .fail_after = after,
                               .fail_register = how});
      run_nccl_ranks(
          k_ranks,
          [&](const rank_context& at) {
            auto region = at.make();
            for (int i = 0; i < 3; ++i) region.grow(tier::device, 2_MiB);
            nccl_communicator on(at.ranks, at.on);
            const auto said = thrown_by_all(*at.ranks, [&] { nccl_window(on, region, k_whole); });
            if (after < (GetParam() < 23003 ? 3 : 1)) {
              EXPECT_THAT(said, HasSubstr("ncclCommWindowRegister"));
              EXPECT_THAT(thrown_by([&] { (void)on.get(); }), HasSubstr("broken"));
            } else {
              EXPECT_EQ(said, "");
            }
            region.grow(tier::device, 2_MiB);
          },
          k_deadline);
    }
  }
}

TEST_P(nccl_faults, a_window_that_cannot_be_taken_down_stops_the_change) {
  for (const change_case& tried : changes()) {
    if (tried.name == "restore" || tried.name == "grow") continue;  // these take nothing down first
    const nccl_fixture fake({.version = GetParam()});
    run_nccl_ranks(k_ranks, [&](const rank_context& at) {
      windowed made(at, tried.name);
      const auto before = layout(made.region);
      at.ranks->barrier();
      const fake_nccl_settings failing{
          .version = GetParam(), .fail_rank = k_victim.value, .fail_deregister = 1};
      if (at.ranks->rank() == rank_id{0}) fake_nccl_configure(&failing);
      at.ranks->barrier();
      EXPECT_THAT(thrown_by_all(*at.ranks, [&] { tried.act(made.region); }),
                  HasSubstr("rank 1: ncclCommWindowDeregister"));
      EXPECT_EQ(layout(made.region), before) << "NCCL still maps what is there";
      EXPECT_EQ(made.window->pieces().size(), 0u);
      EXPECT_THAT(made.window->why_down(), HasSubstr("broken"));
      EXPECT_THAT(thrown_by([&] { (void)made.on.get(); }), HasSubstr("broken"));
      at.ranks->barrier();
    });
  }
}

TEST_P(nccl_faults, a_region_that_cannot_be_closed_keeps_its_windows) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(
      k_ranks,
      [](const rank_context& outer) {
        rank_context at = outer;
        const auto faulty = fault_driver::make(outer.on);
        at.on = faulty;
        windowed made(at, "close");
        const native_stream stream = at.on->create_stream({0});
        const std::array in_use{stream};
        if (at.ranks->rank() == k_victim) faulty->fail_call(driver_call::synchronize_stream, 0);
        EXPECT_THAT(thrown_by_all(*at.ranks, [&] { made.region.close({.streams = in_use}); }),
                    HasSubstr("rank 1: "));
        EXPECT_EQ(made.window->why_down(), "");
        expect_peers_seen(made.on, made.region, *made.window, 1);
        made.region.grow(tier::device, 2_MiB);
        expect_peers_seen(made.on, made.region, *made.window, 2);
        made.region.close({.streams = in_use});
        EXPECT_EQ(made.window->pieces().size(), 0u);
        at.on->destroy_stream(stream);
      },
      k_deadline);
}

TEST(nccl_faults, an_adopted_communicator_that_breaks_is_left_to_its_owner) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(
      k_ranks,
      [](const rank_context& at) {
        auto region = at.make();
        region.grow(tier::device, 2_MiB);
        nccl_communicator owner(at.ranks, at.on);
        nccl_communicator adopted(owner.get(), at.ranks, at.on);
        const nccl_window first(adopted, region, {.bytes = 2_MiB});
        at.ranks->barrier();
        const fake_nccl_settings failing{
            .version = 23007, .fail_rank = k_victim.value, .fail_register = fake_failure::absent};
        if (at.ranks->rank() == rank_id{0}) fake_nccl_configure(&failing);
        at.ranks->barrier();
        EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_window(adopted, region); }),
                    HasSubstr("ncclCommWindowRegister"));
        EXPECT_THAT(thrown_by([&] { (void)first.at(0); }), HasSubstr("broken"));
        EXPECT_NE(owner.get(), nullptr) << "what its owner does with it is the owner's";
        at.ranks->barrier();
      },
      k_deadline);
}

TEST(nccl_faults, a_rank_that_leaves_takes_the_window_with_it) {
  const nccl_fixture fake({.version = 23007});
  run_nccl_ranks(
      3,
      [](const rank_context& at) {
        windowed made(at, "shrink");
        at.ranks->barrier();
        if (at.ranks->rank() == rank_id{2}) return;
        EXPECT_THAT(thrown_by([&] { made.region.shrink(2_MiB); }), HasSubstr("timed_out"));
        EXPECT_EQ(made.region.size(), 6_MiB) << "the memory is intact";
      },
      k_deadline);
}

}  // namespace
}  // namespace evmm::test
