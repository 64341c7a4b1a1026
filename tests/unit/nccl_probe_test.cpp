// SPDX-License-Identifier: Apache-2.0
// What a probe finds, where a version has what it claims and where it fails, loudly or in silence.
#include "tests/support/fault_driver.hpp"
#include "tests/support/nccl_ranks.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <optional>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using std::chrono::milliseconds;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

constexpr int k_ranks = 2;
constexpr rank_id k_victim{1};
constexpr int k_newest = 23007;

std::string report_of(const std::vector<nccl_finding>& findings) {
  std::string text;
  for (const nccl_finding& each : findings) {
    text += std::string(to_string(each.ability)) + (each.tried ? ", tried: " : ": ") +
            (each.works() ? "works" : each.why_not) + "\n";
  }
  return text;
}

/// What a probe finds, on all ranks the same.
std::vector<nccl_finding> probe_on_all(nccl_communicator& on) {
  auto findings = on.probe();
  expect_same_text(on.ranks(), report_of(findings));
  return findings;
}

/// Of those that were tried, the ones that do not work.
std::vector<nccl_ability> failed(const std::vector<nccl_finding>& findings) {
  std::vector<nccl_ability> abilities;
  for (const nccl_finding& each : findings) {
    if (each.tried && !each.works()) abilities.push_back(each.ability);
  }
  return abilities;
}

/// Lets the fake fail from here on, on all ranks.
void fail_from_now(bootstrap& ranks, const fake_nccl_settings& failing) {
  ranks.barrier("test: before the settings");
  if (ranks.rank() == rank_id{0}) fake_nccl_configure(&failing);
  ranks.barrier("test: after the settings");
}

class nccl_probe_versions : public testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(versions, nccl_probe_versions,
                         testing::Values(21800, 22600, 22809, 22907, 23003, k_newest),
                         [](const auto& info) { return std::to_string(info.param); });

TEST_P(nccl_probe_versions, have_what_they_claim_and_the_rest_is_not_tried) {
  const nccl_fixture fake({.version = GetParam()});
  run_nccl_ranks(3, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    std::vector<nccl_ability> abilities;
    for (const nccl_finding& each : probe_on_all(on)) {
      abilities.push_back(each.ability);
      const std::string claimed = on.why_not(each.ability);
      const bool by_gin = each.ability == nccl_ability::gin ||
                          each.ability == nccl_ability::host_segments_over_network;
      EXPECT_EQ(each.tried, claimed.empty() && !by_gin) << to_string(each.ability);
      EXPECT_THAT(each.why_not, HasSubstr(claimed));
      EXPECT_EQ(each.works(), claimed.empty()) << each.why_not;
    }
    EXPECT_THAT(abilities,
                testing::ElementsAre(nccl_ability::user_buffers, nccl_ability::windows,
                                     nccl_ability::several_segments, nccl_ability::host_segments,
                                     nccl_ability::host_segments_over_network,
                                     nccl_ability::peer_pointers, nccl_ability::gin));
    on.close();
  });
}

/// Something that goes wrong on one rank or on all, and what a probe finds then.
struct failure_case {
  std::string name;
  fake_nccl_settings settings;
  std::vector<nccl_ability> fail;
  std::string says;
};

std::vector<failure_case> failure_cases() {
  using enum nccl_ability;
  using enum fake_failure;
  std::vector<failure_case> cases = {
      {"null_windows",
       {.null_windows = 1},
       {windows, several_segments, host_segments, peer_pointers},
       "rank 0: ncclCommWindowRegister"},
      {"user_buffer_refused", {.fail_buffer = 1}, {user_buffers}, "rank 1: ncclCommRegister"},
      {"no_communicator", {.fail_init = 1}, {user_buffers}, "ncclCommInitRankConfig"},
      {"pointers_to_own_memory",
       {.wrong_pointers = 1},
       {peer_pointers},
       "rank 0: rank 1's memory at NCCL's address is wrong from 0 B of 4.0 MiB on"},
      {"window_covers_its_first_of_two_device_segments",
       {.fail_after = 1, .fail_register = lie},
       {several_segments},
       "rank 1: a sum over all ranks is wrong from 2.0 MiB of 4.0 MiB on"},
      {"window_covers_its_device_segment_alone",
       {.fail_after = 2, .fail_register = lie},
       {host_segments},
       "rank 1: a sum over all ranks is wrong from 2.0 MiB of 4.0 MiB on"},
  };
  // One window for each of these, in this order.
  const std::vector<nccl_ability> windowed = {windows, several_segments, host_segments,
                                              peer_pointers};
  // One sum for each, after the first that a communicator makes.
  const std::vector<nccl_ability> summed = {user_buffers, windows, several_segments, host_segments};
  for (int i = 0; i < 4; ++i) {
    const auto nth = static_cast<std::size_t>(i);
    const auto add = [&](const std::string& name, fake_failure fake_nccl_settings::*call,
                         fake_failure how, int after, nccl_ability what, const std::string& says) {
      fake_nccl_settings settings{.fail_after = after};
      settings.*call = how;
      cases.push_back({name + std::to_string(i), settings, {what}, says});
    };
    const auto reg = &fake_nccl_settings::fail_register;
    const auto sum = &fake_nccl_settings::fail_reduce;
    add("window_refused_on_one_rank_", reg, report, i, windowed[nth], "rank 1: ncclCommWindow");
    add("window_waits_for_a_rank_", reg, absent, i, windowed[nth], "ncclCommWindowRegister");
    add("sum_fails_on_one_rank_", sum, report, i + 1, summed[nth], "rank 1: ncclAllReduce");
    add("sum_waits_for_a_rank_", sum, absent, i + 1, summed[nth], "ncclAllReduce");
    add("sum_is_wrong_on_one_rank_", sum, lie, i + 1, summed[nth],
        "rank 1: a sum over all ranks is wrong from");
  }
  for (failure_case& each : cases) {
    each.settings.version = k_newest;
    each.settings.fail_rank = k_victim.value;
  }
  return cases;
}

class nccl_probe_failures : public testing::TestWithParam<failure_case> {};
INSTANTIATE_TEST_SUITE_P(each, nccl_probe_failures, testing::ValuesIn(failure_cases()),
                         [](const auto& info) { return info.param.name; });

TEST_P(nccl_probe_failures, are_found_and_the_rest_is_probed) {
  const nccl_fixture fake({.version = k_newest});
  run_nccl_ranks(
      k_ranks,
      [](const rank_context& at) {
        nccl_communicator on(at.ranks, at.on);
        fail_from_now(*at.ranks, GetParam().settings);
        const auto findings = probe_on_all(on);
        EXPECT_EQ(failed(findings), GetParam().fail) << report_of(findings);
        for (const nccl_finding& each : findings) {
          if (each.tried && !each.works()) {
            EXPECT_THAT(each.why_not, HasSubstr(GetParam().says));
          }
          EXPECT_THAT(each.why_not, HasSubstr(on.why_not(each.ability)));
        }
        // Nothing of that is this communicator's, and it may be otherwise the next time.
        fail_from_now(*at.ranks, {.version = k_newest});
        on.settle("nothing");
        EXPECT_THAT(failed(probe_on_all(on)), testing::IsEmpty());
        on.close();
      },
      milliseconds(2000));
}

TEST(nccl_probe, a_user_buffer_that_nccl_leaves_out_is_found) {
  const nccl_fixture fake({.version = k_newest});
  const scoped_variable local("NCCL_LOCAL_REGISTER", "0");
  run_nccl_ranks(k_ranks, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    EXPECT_THAT(failed(probe_on_all(on)), testing::ElementsAre(nccl_ability::user_buffers));
    EXPECT_THAT(on.why_not(nccl_ability::user_buffers), HasSubstr("registered nothing"));
    on.close();
  });
}

TEST(nccl_probe, what_it_found_is_what_windows_are_refused_with) {
  const nccl_fixture fake({.version = k_newest});
  run_nccl_ranks(k_ranks, [](const rank_context& at) {
    nccl_communicator on(at.ranks, at.on);
    auto region = at.make();
    region.grow(tier::device, 2_MiB);
    region.grow(tier::device, 4_MiB);
    fail_from_now(*at.ranks, {.version = k_newest, .null_windows = 1});
    on.probe();
    const int before = fake_nccl_count().registrations;
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { nccl_window(on, region); }),
                AllOf(StartsWith("unsupported"), HasSubstr("windows failed when tried"),
                      HasSubstr("a new probe()")));
    EXPECT_EQ(fake_nccl_count().registrations, before);
    EXPECT_NO_THROW(nccl_user_buffer(on, region));
    // Where only a window over several segments fails, each gets its own.
    fail_from_now(*at.ranks, {.version = k_newest,
                              .fail_rank = k_victim.value,
                              .fail_after = 1,
                              .fail_register = fake_failure::lie});
    on.probe();
    {
      const nccl_window window(on, region, k_whole);
      EXPECT_EQ(text_of(window.pieces()), "0+2 2+4");
      expect_peers_seen(on, region, window, 1);
      EXPECT_THAT(thrown_by_all(*at.ranks, [&] { on.probe(); }),
                  AllOf(StartsWith("invalid_argument"), HasSubstr("2 windows")));
    }
    on.probe();
    EXPECT_EQ(text_of(nccl_window(on, region, k_whole).pieces()), "0+6");
    on.close();
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { on.probe(); }), HasSubstr("closed"));
  });
}

TEST(nccl_probe, has_deadlines_also_on_what_blocks_or_is_anothers) {
  const nccl_fixture fake({.version = k_newest});
  run_nccl_ranks(
      k_ranks,
      [](const rank_context& at) {
        nccl_communicator owner(at.ranks, at.on, {.blocking = true});
        nccl_communicator adopted(owner.get(), at.ranks, at.on);
        fail_from_now(*at.ranks, {.version = k_newest,
                                  .fail_rank = k_victim.value,
                                  .fail_register = fake_failure::absent});
        EXPECT_THAT(failed(probe_on_all(adopted)), testing::ElementsAre(nccl_ability::windows));
        EXPECT_EQ(owner.why_not(nccl_ability::windows), "");
        adopted.close();
        owner.close();
      },
      milliseconds(2000));
}

TEST(nccl_probe, between_nodes_nothing_is_tried_that_goes_by_gin) {
  const nccl_fixture fake({.version = k_newest});
  const auto bootstraps = make_thread_bootstraps(k_ranks, {"a", "b"});
  const auto thrown = run_ranks(k_ranks, [&](int rank) {
    nccl_communicator on(bootstraps[static_cast<std::size_t>(rank)], host_driver::make());
    for (const nccl_finding& each : probe_on_all(on)) {
      const bool by_gin = each.ability == nccl_ability::gin ||
                          each.ability == nccl_ability::host_segments ||
                          each.ability == nccl_ability::host_segments_over_network;
      EXPECT_EQ(each.tried, !by_gin) << to_string(each.ability);
      EXPECT_EQ(each.works(), each.ability != nccl_ability::gin) << each.why_not;
    }
    on.close();
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(nccl_probe, a_rank_that_leaves_is_told_of_and_nothing_is_kept) {
  const nccl_fixture fake({.version = k_newest});
  run_nccl_ranks(
      3,
      [](const rank_context& outer) {
        rank_context at = outer;
        const auto counted = fault_driver::make(outer.on);
        at.on = counted;
        nccl_communicator on(at.ranks, at.on);
        at.ranks->barrier("test: made");
        if (at.ranks->rank() == rank_id{2}) return;
        EXPECT_THAT(thrown_by([&] { on.probe(); }), HasSubstr("timed_out"));
        EXPECT_EQ(counted->alive().handles, 0u);
        EXPECT_EQ(counted->alive().streams, 0u);
        EXPECT_EQ(on.why_not(nccl_ability::windows), "");
      },
      milliseconds(1500));
}

TEST(nccl_probe, a_driver_call_that_fails_is_found_on_all_ranks_and_leaks_nothing) {
  const nccl_fixture fake({.version = k_newest});
  int points = 0;
  run_nccl_ranks(
      k_ranks,
      [&](const rank_context& outer) {
        const auto faulty = fault_driver::make(outer.on);
        const bool me = outer.ranks->rank() == k_victim;
        nccl_communicator on(outer.ranks, faulty);
        const auto counted = [&] {
          alive_counts alive = faulty->alive();
          alive.descriptors = 0;  // of all ranks, which are not in step here
          return alive;
        };
        const auto before = counted();
        for (std::size_t nth = 0;; ++nth) {
          if (me) faulty->fail_call(nth);
          const auto findings = probe_on_all(on);
          const bool injected = outer.ranks->all_gather_value(
                                    std::uint8_t{me && faulty->disarm()})[k_victim.value] != 0;
          SCOPED_TRACE(std::to_string(nth) + "\n" + report_of(findings));
          EXPECT_EQ(counted(), before);
          EXPECT_LE(failed(findings).size(), injected ? 1u : 0u);
          if (!injected) break;
          if (me) ++points;
        }
        on.close();
      },
      milliseconds(2000));
  std::printf("%d failing points tried\n", points);
  EXPECT_GT(points, 50);
}

}  // namespace
}  // namespace evmm::test
