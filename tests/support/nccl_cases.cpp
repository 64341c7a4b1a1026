// SPDX-License-Identifier: Apache-2.0
#include "tests/support/nccl_cases.hpp"

#include "tests/support/nccl_window_checks.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/nccl_window.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

namespace evmm::test {

using namespace evmm::units;

namespace {

/// A region of D2 D4 in MiB, and a communicator.
struct two_segments {
  explicit two_segments(const rank_context& at)
      : region(at.make()), on(at.ranks, at.on, {.device = at.device}) {
    region.grow(tier::device, 2_MiB);
    region.grow(tier::device, 4_MiB);
  }
  bool can(nccl_ability ability) const { return on.why_not(ability).empty(); }
  symmetric_region region;
  nccl_communicator on;
};

void a_window_shows_every_peers_part(const rank_context& at) {
  two_segments made(at);
  {
    const nccl_window window(made.on, made.region, k_whole);
    EXPECT_EQ(text_of(window.pieces()),
              made.can(nccl_ability::several_segments) ? "0+6" : "0+2 2+4");
    expect_peers_seen(made.on, made.region, window, 1);
  }
  made.on.close();
}

void windows_follow_growth_migration_and_sleep(const rank_context& at) {
  two_segments made(at);
  const bool joined = made.can(nccl_ability::several_segments);
  const bool host = made.can(nccl_ability::host_segments);
  {
    const nccl_window window(made.on, made.region, k_whole);
    const nccl_window first(made.on, made.region, {.bytes = 2_MiB});
    const auto* const kept = first.at(0).window;
    std::uint64_t seed = 10;
    const auto expect = [&](const char* of_joined, const char* of_each) {
      EXPECT_EQ(window.why_down(), "");
      EXPECT_EQ(text_of(window.pieces()), joined ? of_joined : of_each);
      expect_peers_seen(made.on, made.region, window, ++seed);
    };
    made.region.grow(tier::device, 2_MiB);
    expect("0+8", "0+2 2+4 6+2");
    made.region.migrate(1, host ? tier::host : tier::device);
    expect("0+8", "0+2 2+4 6+2");
    made.region.migrate(1, tier::device);
    EXPECT_EQ(made.region.compact({}, 1), 2u);
    expect("0+8", "0+2 2+6");
    made.region.discard(contents::backup, {}, 1, 1);
    EXPECT_NE(window.why_down(), "");
    made.region.restore();
    expect("0+8", "0+2 2+6");
    made.region.shrink(6_MiB);
    expect("0+2", "0+2");
    EXPECT_EQ(first.at(0).window, kept) << "nothing touched it";
  }
  made.on.close();
}

void host_segments_are_in_the_window_or_refused_by_version(const rank_context& at) {
  two_segments made(at);
  made.region.grow(tier::host, 2_MiB);
  if (made.can(nccl_ability::host_segments)) {
    const nccl_window window(made.on, made.region, k_whole);
    EXPECT_EQ(text_of(window.pieces()), "0+8");
    expect_peers_seen(made.on, made.region, window, 30);
  } else {
    EXPECT_NE(thrown_by([&] { nccl_window(made.on, made.region); }).find("2.30.3"),
              std::string::npos);
  }
  {
    const nccl_window devices(made.on, made.region, {.device_only = true, .kernels_only = true});
    EXPECT_EQ(text_of(devices.pieces()),
              made.can(nccl_ability::several_segments) ? "0+6" : "0+2 2+4");
    expect_peers_seen(made.on, made.region, devices, 31);
    const nccl_user_buffer buffers(made.on, made.region);
    EXPECT_EQ(text_of(buffers.pieces()), "0+2 2+4");
    made.region.shrink(6_MiB);
    EXPECT_EQ(text_of(buffers.pieces()), "0+2");
  }
  made.on.close();
}

void a_pin_on_one_rank_holds_the_window_on_all(const rank_context& at) {
  two_segments made(at);
  {
    const nccl_window window(made.on, made.region, k_whole);
    const auto before = layout(made.region);
    nccl_pin pin;
    if (at.ranks->rank().value == at.ranks->size() - 1) pin = window.pin();
    EXPECT_NE(thrown_by([&] { made.region.shrink(4_MiB); }).find("pinned"), std::string::npos);
    EXPECT_EQ(layout(made.region), before);
    expect_peers_seen(made.on, made.region, window, 40);
    pin.reset();
    made.region.shrink(4_MiB);
    expect_peers_seen(made.on, made.region, window, 41);
  }
  made.on.close();
}

void a_probe_finds_working_what_the_version_claims(const rank_context& at) {
  nccl_communicator on(at.ranks, at.on, {.device = at.device});
  for (const nccl_finding& each : on.probe()) {
    const char* const name = to_string(each.ability);
    if (at.ranks->rank() == rank_id{0}) {
      std::printf("NCCL %d, %s: %s\n", on.version(), name,
                  !each.works() ? each.why_not.c_str()
                  : each.tried  ? "works"
                                : "claimed");
    }
    const bool claimed = on.version() >= nccl_version_with(each.ability);
    EXPECT_TRUE(claimed || !each.tried) << name;
    EXPECT_TRUE(each.works() || !each.tried) << name << ": " << each.why_not;
    if (each.ability == nccl_ability::windows || each.ability == nccl_ability::several_segments ||
        (each.ability == nccl_ability::host_segments && at.ranks->node_count() == 1)) {
      EXPECT_EQ(each.tried, claimed) << name << ": " << each.why_not;
    }
  }
  on.close();
}

}  // namespace

const std::vector<symmetric_case>& nccl_cases() {
#define EVMM_CASE(name) \
  { #name, name }
  static const std::vector<symmetric_case> cases = {
      EVMM_CASE(a_window_shows_every_peers_part),
      EVMM_CASE(windows_follow_growth_migration_and_sleep),
      EVMM_CASE(host_segments_are_in_the_window_or_refused_by_version),
      EVMM_CASE(a_pin_on_one_rank_holds_the_window_on_all),
      EVMM_CASE(a_probe_finds_working_what_the_version_claims),
  };
#undef EVMM_CASE
  return cases;
}

}  // namespace evmm::test
