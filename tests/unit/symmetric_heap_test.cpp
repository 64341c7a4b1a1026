// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"
#include "tests/support/heap_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstdio>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;
using ::testing::HasSubstr;

void expect_no_failure(const std::vector<std::exception_ptr>& thrown) {
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

/// Ranks as threads, each with a host driver of its own, as processes have.
void run_threads(int size, const std::function<void(const rank_context&)>& body,
                 const host_driver_options& options = {.device_bytes = 1_GiB,
                                                       .host_bytes = 4_GiB}) {
  const auto bootstraps = make_thread_bootstraps(size);
  expect_no_failure(run_ranks(size, [&](int rank) {
    body({.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = host_driver::make(options)});
  }));
}

struct threads_case {
  int ranks;
  symmetric_case tried;
  friend void PrintTo(const threads_case& run, std::ostream* out) {
    *out << run.tried.name << " on " << run.ranks << " ranks";
  }
};
class heap_threads : public ::testing::TestWithParam<threads_case> {};

TEST_P(heap_threads, holds) {
  run_threads(GetParam().ranks, GetParam().tried.run);
}

std::vector<threads_case> all_cases() {
  std::vector<threads_case> all;
  for (const int ranks : {1, 2, 4}) {
    for (const symmetric_case& tried : heap_cases()) all.push_back({ranks, tried});
    for (const symmetric_case& tried : heap_change_cases()) all.push_back({ranks, tried});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(ranks, heap_threads, ::testing::ValuesIn(all_cases()),
                         [](const auto& info) {
                           return info.param.tried.name + "_" + std::to_string(info.param.ranks);
                         });

TEST(symmetric_heap, ten_thousand_calls_on_eight_ranks_place_alike) {
  run_threads(8, [](const rank_context& at) { run_random_heap(at, 10'000, 5); });
}

TEST(symmetric_heap, several_nodes_place_alike) {
  const auto bootstraps = make_thread_bootstraps(4, {"a", "b", "a", "b"});
  expect_no_failure(run_ranks(4, [&](int rank) {
    run_random_heap({.ranks = bootstraps[static_cast<std::size_t>(rank)],
                     .on = host_driver::make({.device_bytes = 1_GiB, .host_bytes = 4_GiB})},
                    1'000, 6);
  }));
}

TEST(symmetric_heap, a_rank_whose_device_is_full_sends_all_to_the_host_tier) {
  const auto bootstraps = make_thread_bootstraps(3);
  expect_no_failure(run_ranks(3, [&](int rank) {
    const auto on = host_driver::make({.device_bytes = rank == 1 ? 8_MiB : 64_MiB});
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)], .on = on};
    symmetric_heap heap(at.make(), {.growth_step = 2_MiB});
    const std::size_t a = heap.allocate(6_MiB);
    const std::size_t b = heap.allocate(6_MiB);
    const auto view = heap.region().view();
    EXPECT_FALSE(view.on_host(0, a));
    for (int r = 0; r < 3; ++r) EXPECT_TRUE(view.on_host(r, b));
    const auto said = thrown_by(
        [&] { (void)heap.allocate(4_MiB, nullptr, {.tiers = tier_policy::device_only}); });
    EXPECT_THAT(said, HasSubstr("rank 1 may take 2.0 MiB more"));
    heap.close();
  }));
}

TEST(symmetric_heap, the_one_name_of_many_streams_is_refused) {
  run_threads(1, [](const rank_context& at) {
    symmetric_heap heap(at.make());
    const std::size_t block = heap.allocate(1_MiB);
    const auto per_thread = reinterpret_cast<native_stream>(std::uintptr_t{2});
    EXPECT_THROW((void)heap.allocate(1_MiB, per_thread), unsupported);
    EXPECT_THROW(heap.record_stream(block, per_thread), unsupported);
    heap.free(block);
    heap.close();
  });
}

TEST(symmetric_heap, host_memory_kept_for_reuse_is_no_room_on_the_device) {
  const auto bootstraps = make_thread_bootstraps(2);
  expect_no_failure(run_ranks(2, [&](int rank) {
    const rank_context at{.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({.device_bytes = 16_MiB})};
    symmetric_heap heap(at.make());
    heap.grow(tier::host, 8_MiB);
    heap.migrate(0, 8_MiB, tier::device);
    EXPECT_EQ(heap.region().statistics().cached_bytes, 8_MiB);
    for (int i = 0; i < 2; ++i) heap.grow(tier::host, 6_MiB);
    const auto said = thrown_by_all(*at.ranks, [&] { heap.migrate(8_MiB, 12_MiB, tier::device); });
    EXPECT_THAT(said, HasSubstr("cannot take 12.0 MiB more of DEVICE"));
    EXPECT_THAT(said, HasSubstr("rank 0 may take 8.0 MiB"));
    EXPECT_THAT(said, HasSubstr("or free what else takes the device's memory"));
    EXPECT_EQ(heap.region().statistics().device_bytes, 8_MiB) << "nothing has moved";
    heap.close();
  }));
}

/// A collective call to try on a heap of some segments, all but the last one in use.
struct heap_change {
  std::string name;
  std::function<void(symmetric_heap&)> act;
};

std::vector<heap_change> changes() {
  return {
      {"a full heap", [](auto& heap) { (void)heap.allocate(6_MiB); }},
      {"span", [](auto& heap) { (void)heap.allocate(12_MiB, nullptr, {.may_span = true}); }},
      {"grow", [](auto& heap) { heap.grow(tier::device, 2_MiB); }},
      {"trim", [](auto& heap) { heap.trim(); }},
      {"migrate", [](auto& heap) { heap.migrate(0, 2_MiB, tier::host); }},
      {"compact", [](auto& heap) { heap.compact(); }},
  };
}

/// Sizes and tiers of the segments; an epoch passes for a growth that is given back.
std::string segments_of(const symmetric_heap& heap) {
  std::string text;
  for (const segment& held : heap.region().segments(heap.region().rank())) {
    text += std::to_string(held.offset) + "+" + std::to_string(held.bytes) + "@" +
            to_string(held.where) + " ";
  }
  return text;
}

class heap_faults : public ::testing::TestWithParam<int> {};

TEST_P(heap_faults, a_call_that_fails_on_one_rank_fails_on_all_and_the_heap_goes_on) {
  const int size = GetParam();
  const rank_id victim{size - 1};
  std::size_t points = 0;
  run_threads(size, [&](const rank_context& outer) {
    rank_context at = outer;
    const auto faulty = fault_driver::make(outer.on);
    at.on = faulty;
    const bool me = at.ranks->rank() == victim;
    for (const heap_change& tried : changes()) {
      for (std::size_t nth = 0;; ++nth) {
        symmetric_heap heap(at.make({.reserve = 64_MiB, .cache_limit = 0}),
                            {.growth_step = 2_MiB, .device_limit = 16_MiB});
        std::vector<std::size_t> blocks;
        for (int i = 0; i < 4; ++i) blocks.push_back(heap.allocate(2_MiB));
        heap.free(blocks.back());
        const auto before = segments_of(heap);
        at.ranks->barrier();
        if (me) faulty->fail_call(nth);
        const auto said = thrown_by([&] { tried.act(heap); });
        const bool injected =
            at.ranks->all_gather_value(
                std::uint8_t{me && faulty->disarm()})[static_cast<std::size_t>(victim.value)] != 0;
        SCOPED_TRACE(tried.name + " " + std::to_string(nth) + ": " + said);
        heap.check_invariants();
        if (!injected) {
          EXPECT_EQ(said, "") << "without a failure it succeeds";
          heap.close();
          break;
        }
        if (me) ++points;
        if (!said.empty()) {
          EXPECT_THAT(said, HasSubstr("rank " + std::to_string(victim.value)));
          EXPECT_EQ(segments_of(heap), before);
          tried.act(heap);  // in step, and it can be done after all
        }
        heap.check_invariants();
        heap.verify();
        for (std::size_t i = 0; i < 3; ++i) heap.free(blocks[i]);
        heap.trim();
        heap.close();
      }
    }
  });
  std::printf("%zu failing points tried on %d ranks\n", points, size);
  EXPECT_GT(points, 30u);
}
INSTANTIATE_TEST_SUITE_P(ranks, heap_faults, ::testing::Values(1, 2));

TEST(symmetric_heap, a_report_that_fails_on_one_rank_fails_on_all) {
  run_threads(2, [](const rank_context& outer) {
    rank_context at = outer;
    const auto faulty = fault_driver::make(outer.on);
    at.on = faulty;
    symmetric_heap heap(at.make());
    // The first is asked when the ranks compare their calls, which goes on without an answer.
    if (at.ranks->rank() == rank_id{1}) faulty->fail_call(driver_call::usage, 1);
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { (void)heap.report(); }), HasSubstr("rank 1: usage"));
    EXPECT_EQ(heap.report().ranks.size(), 2u);
    heap.close();
  });
}

TEST(symmetric_heap, a_free_that_fails_on_one_rank_leaves_it_in_step) {
  run_threads(2, [](const rank_context& outer) {
    rank_context at = outer;
    const auto faulty = fault_driver::make(outer.on);
    at.on = faulty;
    const bool me = at.ranks->rank() == rank_id{1};
    symmetric_heap heap(at.make());
    const std::size_t first = heap.allocate(4096);
    (void)heap.allocate(4096);
    if (me) faulty->fail_call(driver_call::record, 0);
    EXPECT_EQ(thrown_by([&] { heap.free(first); }).empty(), !me);
    heap.verify();
    EXPECT_THAT(thrown_by([&] { heap.free(first); }), HasSubstr("cannot free offset 0"));
    EXPECT_EQ(heap.allocate(4096), first) << "it is free all the same";
    heap.verify();
    heap.check_invariants();
    heap.close();
  });
}

TEST(symmetric_heap, a_rank_that_does_not_come_is_named) {
  const auto bootstraps = make_thread_bootstraps(3);
  for (const auto& one : bootstraps) one->set_timeout(std::chrono::milliseconds(300));
  expect_no_failure(run_ranks(3, [&](int rank) {
    symmetric_heap heap(symmetric_region(bootstraps[static_cast<std::size_t>(rank)],
                                         host_driver::make(), {.reserve = 64_MiB}));
    (void)heap.allocate(4096);
    if (rank == 1) return;
    const auto said = thrown_by([&] { (void)heap.allocate(64_MiB); });
    EXPECT_THAT(said, HasSubstr("timed_out"));
    EXPECT_THAT(said, HasSubstr("rank 1"));
    EXPECT_EQ(heap.allocate(4096), 4096u) << "what is free is still served";
  }));
}

}  // namespace
}  // namespace evmm::test
