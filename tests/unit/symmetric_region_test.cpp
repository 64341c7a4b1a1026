// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"
#include "tests/support/patterns.hpp"
#include "tests/support/symmetric_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_region.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

/// Ranks as threads, each with a host driver of its own, as processes have.
std::vector<std::exception_ptr> run_threads(
    int size, const std::function<void(const rank_context&)>& body,
    const std::function<std::shared_ptr<driver>(int rank)>& make_driver = [](int) {
      return host_driver::make({.device_bytes = 1_GiB, .host_bytes = 4_GiB});
    }) {
  const auto bootstraps = make_thread_bootstraps(size);
  return run_ranks(size, [&](int rank) {
    body({.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = make_driver(rank)});
  });
}

struct threads_case {
  int ranks;
  symmetric_case tried;
  friend void PrintTo(const threads_case& run, std::ostream* out) {
    *out << run.tried.name << " on " << run.ranks << " ranks";
  }
};

class symmetric_threads : public ::testing::TestWithParam<threads_case> {};

TEST_P(symmetric_threads, holds) {
#ifdef __SANITIZE_THREAD__
  if (GetParam().tried.name == "the_same_address_everywhere_when_asked_for") {
    GTEST_SKIP() << "the thread sanitizer forbids the addresses that this tries";
  }
#endif
  const auto thrown = run_threads(GetParam().ranks, GetParam().tried.run);
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

std::vector<threads_case> all_cases() {
  std::vector<threads_case> all;
  for (const int ranks : {1, 2, 4}) {
    for (const symmetric_case& tried : symmetric_cases()) all.push_back({ranks, tried});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(ranks, symmetric_threads, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) {
                           return info.param.tried.name + "_" + std::to_string(info.param.ranks);
                         });

TEST(symmetric_region, one_rank_out_of_memory_is_out_of_memory_for_all) {
  const auto thrown = run_threads(
      3,
      [](const rank_context& at) {
        auto region = at.make();
        region.grow(tier::device, 4_MiB);
        expect_shared(region, 1);
        const auto before = layout(region);
        const auto said = thrown_by([&] { region.grow(tier::device, 8_MiB); });
        EXPECT_EQ(said.find("out_of_memory: rank 1"), 0u) << said;
        EXPECT_NE(said.find("8.0 MiB on DEVICE 0"), std::string::npos) << said;
        EXPECT_EQ(layout(region), before);
        expect_still_shared(region, 1);
        // The full rank may take host memory where the others take the device.
        region.grow(at.ranks->rank() == rank_id{1} ? tier::host : tier::device, 8_MiB);
        expect_shared(region, 2);
        region.close();
      },
      [](int rank) { return host_driver::make({.device_bytes = rank == 1 ? 8_MiB : 64_MiB}); });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

/// A collective change to try, on a region of four segments and a discarded one.
struct change_case {
  std::string name;
  std::function<void(symmetric_region&)> act;
};

std::vector<change_case> changes() {
  return {
      {"grow device", [](auto& region) { region.grow(tier::device, 2_MiB); }},
      {"grow host", [](auto& region) { region.grow(tier::host, 4_MiB); }},
      {"shrink", [](auto& region) { region.shrink(4_MiB); }},
      {"migrate to host", [](auto& region) { region.migrate(0, tier::host); }},
      {"migrate to device", [](auto& region) { region.migrate(1, tier::device); }},
      {"discard, drop", [](auto& region) { region.discard(contents::drop); }},
      {"discard, backup", [](auto& region) { region.discard(contents::backup); }},
      {"restore", [](auto& region) { region.restore(); }},
      {"compact", [](auto& region) { region.compact(); }},
  };
}

/// One way for a driver call to fail.
struct failing {
  std::string name;
  std::function<void(fault_driver&, std::size_t)> arm;
};

std::vector<failing> ways_to_fail() {
  std::vector<failing> ways = {
      {"any call", [](fault_driver& faulty, std::size_t nth) { faulty.fail_call(nth); }}};
  for (const driver_call kind : {driver_call::synchronize_stream, driver_call::unmap}) {
    ways.push_back({to_string(kind), [kind](fault_driver& faulty, std::size_t nth) {
                      faulty.fail_call(kind, nth);
                    }});
  }
  return ways;
}

/// A little of every mapped segment, written by its owner and found by every rank: enough to tell
/// whether memory went astray, and quick.
void mark(const symmetric_region& region) {
  for (const segment& held : region.segments(region.rank())) {
    if (held.state != segment_state::mapped) continue;
    write_pattern(region.on(), reinterpret_cast<address>(region.local()) + held.offset, 4_KiB,
                  held.offset + static_cast<std::uint64_t>(region.rank().value));
  }
  region.ranks().barrier("test: marked");
}
/// The marks of the first `count` segments that are mapped.
void expect_marks(const symmetric_region& region, std::size_t count) {
  region.ranks().barrier("test: looking");
  for (const rank_id peer : region.ranks().node_ranks()) {
    std::size_t left = count;
    for (const segment& held : region.segments(peer)) {
      if (held.state != segment_state::mapped || left-- == 0) break;
      EXPECT_TRUE(holds_pattern(region.on(),
                                reinterpret_cast<address>(region.peer(peer)) + held.offset, 4_KiB,
                                held.offset + static_cast<std::uint64_t>(peer.value)));
    }
  }
  region.ranks().barrier("test: seen");
}

/// Counts that do not see the descriptors of ranks that are threads of this process.
std::string alive_here(const fault_driver& faulty) {
  alive_counts counts = faulty.alive();
  counts.descriptors = 0;
  return to_string(counts);
}

class symmetric_faults : public ::testing::TestWithParam<int> {};

TEST_P(symmetric_faults, a_change_that_fails_on_one_rank_fails_on_all_and_leaves_no_trace) {
  const int size = GetParam();
  const rank_id victim{size - 1};
  constexpr std::size_t all = 6;
  std::size_t points = 0;
  const auto thrown = run_threads(size, [&](const rank_context& outer) {
    rank_context at = outer;
    const auto faulty = fault_driver::make(outer.on);
    at.on = faulty;
    const bool me = at.ranks->rank() == victim;
    for (const change_case& tried : changes()) {
      for (const failing& way : ways_to_fail()) {
        for (std::size_t nth = 0;; ++nth) {
          auto region = at.make({.reserve = 64_MiB, .cache_limit = 0});
          for (const tier kind :
               {tier::device, tier::host, tier::device, tier::device, tier::device}) {
            region.grow(kind, 2_MiB);
          }
          region.migrate(2, tier::host);
          region.migrate(2, tier::device);
          mark(region);
          region.discard(contents::backup, {}, 4, 1);
          const auto alive = alive_here(*faulty);
          const auto before = layout(region);
          at.ranks->barrier();

          if (me) way.arm(*faulty, nth);
          const auto said = thrown_by([&] { tried.act(region); });
          const bool injected =
              at.ranks->all_gather_value(std::uint8_t{
                  me && faulty->disarm()})[static_cast<std::size_t>(victim.value)] != 0;

          SCOPED_TRACE(tried.name + ", " + way.name + " " + std::to_string(nth) + ": " + said);
          if (!injected) {
            EXPECT_EQ(said, "") << "without a failure it succeeds";
            break;
          }
          if (me) ++points;
          if (said.empty()) continue;  // cured by a second attempt, or in a clean-up that only logs
          EXPECT_NE(said.find("rank " + std::to_string(victim.value)), std::string::npos);
          EXPECT_EQ(layout(region), before);
          EXPECT_EQ(alive_here(*faulty), alive);
          expect_marks(region, all);
          tried.act(region);  // in step, and it can be done after all
          if (region.statistics().discarded_bytes > 0) region.restore();
          if (tried.name == "discard, drop") mark(region);
          // What shrank has one whole segment left; what grew, one that nobody marked.
          expect_marks(region, tried.name == "shrink"           ? 2
                               : tried.name.starts_with("grow") ? 5
                                                                : all);
        }
      }
    }
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
  RecordProperty("failing_points", static_cast<int>(points));
  std::printf("%zu failing points tried on %d ranks\n", points, size);
  EXPECT_GT(points, 50u);
}
INSTANTIATE_TEST_SUITE_P(ranks, symmetric_faults, ::testing::Values(1, 2, 3));

TEST(symmetric_region, a_rank_that_leaves_does_not_hang_the_others) {
  const auto bootstraps = make_thread_bootstraps(3);
  for (const auto& one : bootstraps) one->set_timeout(std::chrono::milliseconds(300));
  const auto thrown = run_ranks(3, [&](int rank) {
    const auto on = host_driver::make();
    symmetric_region region(bootstraps[static_cast<std::size_t>(rank)], on, {.reserve = 64_MiB});
    region.grow(tier::device, 2_MiB);
    region.ranks().barrier();
    if (rank == 2) return;
    const auto before = layout(region);
    const auto said = thrown_by([&] { region.grow(tier::device, 2_MiB); });
    EXPECT_EQ(said.find("timed_out"), 0u) << said;
    EXPECT_NE(said.find("rank 2"), std::string::npos) << said;
    EXPECT_EQ(layout(region), before) << "its memory is intact";
    const auto again = thrown_by([&] { region.grow(tier::device, 2_MiB); });
    EXPECT_EQ(again.find("peer_error"), 0u) << again;
    region.close();  // what is left can still be given back
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(symmetric_region, changes_with_the_longest_timeout_too) {
  const auto thrown = run_threads(2, [](const rank_context& at) {
    auto region = at.make();
    at.ranks->set_timeout(std::chrono::hours(7 * 24));
    region.grow(tier::device, at.granule());
    EXPECT_EQ(at.ranks->timeout(), std::chrono::hours(7 * 24));
    region.close();
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(symmetric_region, who_follows_it_hears_once_that_it_goes_with_the_memory_in_place) {
  for (const bool closed : {true, false}) {
    const auto bootstrap = make_thread_bootstraps(1)[0];
    int told = 0;
    std::optional<symmetric_region> region(std::in_place, bootstrap, host_driver::make({}),
                                           symmetric_options{.reserve = 64_MiB});
    region->grow(tier::device, 2_MiB);
    std::byte* const at = region->local();
    const auto following = region->follow({.gone = [&] {
      *at = std::byte{1};
      ++told;
    }});
    if (closed) region->close();
    region.reset();
    EXPECT_EQ(told, 1);
  }
}

TEST(symmetric_region, ranks_of_other_nodes_are_symmetric_but_out_of_reach) {
  const auto bootstraps = make_thread_bootstraps(4, {"a", "a", "b", "b"});
  const auto thrown = run_ranks(4, [&](int rank) {
    symmetric_region region(bootstraps[static_cast<std::size_t>(rank)], host_driver::make(),
                            {.reserve = 64_MiB});
    region.grow(tier::device, 2_MiB);
    expect_shared(region, 3);
    const rank_id far{(rank + 2) % 4};
    EXPECT_FALSE(region.reachable(far));
    const auto said = thrown_by([&] { (void)region.peer(far); });
    EXPECT_EQ(said.find("unsupported"), 0u) << said;
    region.migrate(0, rank == 3 ? tier::host : tier::device);
    EXPECT_EQ(region.epoch(), 2u) << "the same on every node";
    expect_still_shared(region, 3);
    region.close();
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

TEST(symmetric_region, signals_and_barriers_order_host_functions) {
  const auto thrown = run_threads(4, [](const rank_context& at) {
    auto region = at.make();
    region.grow(tier::host, 2_MiB);
    const symmetric_view view = region.view();
    constexpr std::uint64_t data = 4096;
    const native_stream stream = at.on->create_stream({0});
    int wrong = 0;
    for (std::uint64_t round = 1; round <= 50; ++round) {
      at.on->launch(stream, [&, round] {
        for (int r = 0; r < view.ranks; ++r) {
          view.peer<std::uint64_t>(r, data)[view.rank] = round * 10 + std::uint64_t(view.rank);
        }
        if (!barrier(view, 0, 2 * round - 1, 100'000'000)) ++wrong;
        for (int r = 0; r < view.ranks; ++r) {
          if (view.local<std::uint64_t>(data)[r] != round * 10 + std::uint64_t(r)) ++wrong;
        }
        if (!barrier(view, 0, 2 * round, 100'000'000)) ++wrong;
      });
    }
    at.on->synchronize(stream);
    EXPECT_EQ(wrong, 0);
    at.on->destroy_stream(stream);
    region.close();
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

}  // namespace
}  // namespace evmm::test
