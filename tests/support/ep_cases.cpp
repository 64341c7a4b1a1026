// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"

#include "tests/support/ep_rank.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/ep/low_latency.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

void rows_arrive_and_are_combined(const rank_context& at) {
  auto script =
      script_for(at, {.experts = 4, .top_k = 4, .hidden = 512, .max_tokens = 150, .sms = 4});
  script.seed = 1;
  script.masked = 5;
  ep_rank mine(at, script.options);
  mine.run(script, false);
  // Other counts on every rank, none on the first.
  for (std::size_t r = 0; r < script.counts.size(); ++r) script.counts[r] = r * 37 % 151;
  script.seed = 2;
  mine.run(script, true);
  std::fill(script.counts.begin(), script.counts.end(), 0);
  mine.run(script, false);
}

void fp8_rows_bring_their_scales(const rank_context& at) {
  auto script = script_for(at, {.experts = 8,
                                .top_k = 8,
                                .hidden = 1280,
                                .rows = ep::payload::fp8,
                                .max_tokens = 100,
                                .sms = 4});
  script.seed = 3;
  ep_rank mine(at, script.options);
  mine.run(script, false);
}

void what_exceeds_the_expected_load_lies_in_host_memory(const rank_context& at) {
  auto script = script_for(
      at,
      {.experts = 2, .top_k = 2, .hidden = 4096, .max_tokens = 300, .device_rows = 256, .sms = 4});
  script.seed = 4;
  script.hot = 1;  // all to the first rank
  ep_rank mine(at, script.options);
  mine.run(script, true);
  const auto counts = mine.exchange().counts();
  if (at.ranks->rank() == rank_id{0}) {
    EXPECT_GT(counts.spilled, 0u);
  }
}

void bf16_rows_are_quantised_as_they_are_sent(const rank_context& at) {
  auto script = script_for(at, {.experts = 4,
                                .top_k = 3,
                                .hidden = 1408,
                                .rows = ep::payload::fp8,
                                .quantize = true,
                                .max_tokens = 90,
                                .sms = 3});
  script.seed = 12;
  ep_rank mine(at, script.options);
  mine.run(script, false);
}

void rows_lie_in_aligned_groups_by_expert(const rank_context& at) {
  for (const auto rows : {ep::payload::bf16, ep::payload::fp8}) {
    auto script = script_for(at, {.experts = 5,
                                  .top_k = 6,
                                  .hidden = 384,
                                  .rows = rows,
                                  .arranged = ep::layout::by_expert,
                                  .expert_alignment = 8,
                                  .max_tokens = 130,
                                  .sms = 4});
    script.seed = 13;
    script.masked = 4;
    ep_rank mine(at, script.options);
    mine.run(script, true);
    for (std::size_t r = 0; r < script.counts.size(); ++r) script.counts[r] = r * 41 % 131;
    script.hot = 2;
    mine.run(script, false);
    std::fill(script.counts.begin(), script.counts.end(), 0);
    mine.run(script, false);
  }
}

void groups_beyond_the_expected_load_lie_in_host_memory(const rank_context& at) {
  auto script = script_for(at, {.experts = 2,
                                .top_k = 2,
                                .hidden = 4096,
                                .arranged = ep::layout::by_expert,
                                .expert_alignment = 16,
                                .max_tokens = 300,
                                .device_expert_rows = 256,
                                .adapt_steps = 2,
                                .sms = 4});
  script.seed = 14;
  ep_rank mine(at, script.options);
  mine.run(script, false);
  EXPECT_GT(mine.exchange().counts().spilled_expert_rows, 0u);
  EXPECT_EQ(mine.exchange().counts().spilled, 0u);
}

void a_plan_sends_other_rows_by_the_same_routing(const rank_context& at) {
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    auto script = script_for(at, {.experts = 4,
                                  .top_k = 2,
                                  .hidden = 256,
                                  .arranged = arranged,
                                  .max_tokens = 64,
                                  .sms = 2});
    script.seed = 5;
    ep_rank mine(at, script.options);
    ep::plan other_plan = mine.exchange().make_plan();
    mine.run(script, false);
    // Another dispatch between changes nothing of what the plan says.
    auto between = script;
    between.seed = 16;
    mine.exchange().dispatch(mine.upload(between), other_plan, mine.stream());
    auto other = script;
    other.seed = 6;
    other.routing_seed = script.seed;
    ep::tokens again = mine.upload(other);
    const auto got = mine.exchange().dispatch_again(again, mine.plan(), mine.stream());
    mine.expect_received(other, got);
    EXPECT_EQ(mine.combine(other, false), combined(other, mine.me(), {}));
    again.count = 1;
    EXPECT_THAT(
        thrown_by([&] { mine.exchange().dispatch_again(again, mine.plan(), mine.stream()); }),
        HasSubstr("cannot send 1 tokens by a plan of 64"));
  }
}

void gradients_go_the_way_back(const rank_context& at) {
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    for (const auto rows : {ep::payload::bf16, ep::payload::fp8}) {
      auto script = script_for(at, {.experts = 4,
                                    .top_k = 3,
                                    .hidden = 256,
                                    .rows = rows,
                                    .quantize = rows == ep::payload::fp8,
                                    .arranged = arranged,
                                    .max_tokens = 40,
                                    .sms = 2});
      script.seed = 17;
      script.masked = 3;
      for (std::size_t r = 0; r < script.counts.size(); ++r) script.counts[r] = 40 - r * 7 % 41;
      ep_rank mine(at, script.options);
      mine.run(script, false);
      mine.run_backward(script);
    }
  }
}

void a_captured_graph_exchanges_what_is_there_when_it_runs(const rank_context& at) {
  if (at.ranks->node_count() > 1) GTEST_SKIP() << "what crosses nodes is not captured";
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    auto script = script_for(at, {.experts = 4,
                                  .top_k = 4,
                                  .hidden = 384,
                                  .arranged = arranged,
                                  .max_tokens = 50,
                                  .sms = 3});
    script.seed = 18;
    ep_rank mine(at, script.options);
    mine.run(script, false);
    const ep::tokens from = mine.upload(script);
    scoped_capture graph(*at.on, mine.stream());
    const ep::received got = mine.exchange().dispatch(from, mine.plan(), mine.stream());
    mine.exchange().combine(mine.plan(), mine.out(), nullptr, mine.stream());
    graph.end();
    for (std::uint64_t replay = 0; replay < 3; ++replay) {
      // An exchange of its own between replays, and other rows and routing in each.
      auto eager = script;
      eager.seed = 30 + replay;
      mine.run(eager, true);
      script.seed = 20 + replay;
      mine.upload(script);
      mine.write_outputs(script);
      graph.launch(mine.stream());
      at.on->synchronize(mine.stream());
      mine.expect_received(script, got);
      const auto sums = mine.get(mine.out(), script.counts[0] * script.options.hidden);
      // By expert the outputs were written to where the rows of the round before lay.
      if (arranged == ep::layout::by_source) {
        EXPECT_EQ(sums, combined(script, mine.me(), {}));
      }
    }
    mine.exchange().check();
  }
}

void wrong_exchanges_are_refused(const rank_context& at) {
  const auto refused = [&](const ep::exchange_options& options, const std::string& why) {
    symmetric_heap heap(at.make());
    if (at.ranks->node_count() == 1) {
      EXPECT_THAT(thrown_by([&] { ep::exchange(heap, options); }), HasSubstr(why));
    } else {
      symmetric_channel across(heap.region());
      EXPECT_THAT(thrown_by([&] { ep::exchange(heap, across, options); }), HasSubstr(why));
      across.close();
    }
    heap.close();
  };
  const ep::exchange_options good{.experts = at.ranks->size(), .top_k = 1, .hidden = 128};
  auto bad = good;
  bad.experts = 0;
  refused(bad, "experts is 0");
  if (at.ranks->node_count() > 1) {
    symmetric_heap heap(at.make());
    EXPECT_THAT(thrown_by([&] { ep::exchange(heap, good); }),
                HasSubstr("give the channel that carries what crosses nodes"));
    heap.close();
  }
  {
    symmetric_heap heap(at.make());
    symmetric_region other = at.make();
    symmetric_channel elsewhere(other);
    EXPECT_THAT(thrown_by([&] { ep::exchange(heap, elsewhere, good); }),
                HasSubstr("the channel is not on the region of the heap"));
    EXPECT_THAT(thrown_by([&] {
                  ep::low_latency_exchange(heap, elsewhere,
                                           {.experts = good.experts, .top_k = 1, .hidden = 128});
                }),
                HasSubstr("the channel is not on the region of the heap"));
    elsewhere.close();
    heap.close();
    other.close();
  }
  bad = good;
  bad.hidden = 100;
  refused(bad, "hidden is 100");
  bad = good;
  bad.top_k = 33;
  refused(bad, "top_k is 33");
  bad = good;
  bad.quantize = true;
  refused(bad, "quantize is set for rows of bf16");
  bad = good;
  bad.timeout = std::chrono::milliseconds::max();
  refused(bad, "the timeout is 9223372036854775807 ms");
  bad = good;
  bad.experts = at.ranks->size() * 32768;
  refused(bad, "experts is " + std::to_string(bad.experts));
  bad = good;
  bad.expert_alignment = 0;
  refused(bad, "expert_alignment is 0");
  if (at.ranks->size() > 1) {
    bad = good;
    bad.sms = at.ranks->rank() == rank_id{1} ? 3 : 2;
    refused(bad, "sms is 2 on rank 0 and 3 on rank 1");
  }

  auto script =
      script_for(at, {.experts = 1, .top_k = 1, .hidden = 128, .max_tokens = 8, .sms = 1});
  ep_rank mine(at, script.options);
  auto tokens = mine.upload(script);
  tokens.count = 9;
  EXPECT_THAT(thrown_by([&] { mine.exchange().dispatch(tokens, mine.plan(), mine.stream()); }),
              HasSubstr("9 tokens: the exchange was made for 8"));
  tokens.count = 8;
  auto scaled = tokens;
  const float scale = 1;
  scaled.scales = &scale;
  EXPECT_THAT(thrown_by([&] { mine.exchange().dispatch(scaled, mine.plan(), mine.stream()); }),
              HasSubstr("scales with rows of bf16"));
  tokens.topk_ids = nullptr;
  EXPECT_THAT(thrown_by([&] { mine.exchange().dispatch(tokens, mine.plan(), mine.stream()); }),
              HasSubstr("topk_ids is null"));
  mine.exchange().check();
}

/// What is taken of a heap now: blocks, and segments of pools.
ep::heap_footprint taken_of(const symmetric_heap& heap) {
  ep::heap_footprint taken;
  for (const segment_snapshot& segment : heap.snapshot().segments) {
    (segment.where == tier::device ? taken.device_bytes : taken.host_bytes) +=
        segment.pool == pool_number{} ? segment.allocated_bytes : segment.total_bytes;
  }
  return taken;
}
std::string text_of(const ep::heap_footprint& of) {
  return std::to_string(of.device_bytes) + " on the device, " + std::to_string(of.host_bytes) +
         " on the host";
}

void what_is_taken_can_be_told_before(const rank_context& at) {
  symmetric_heap heap(at.make({.reserve = 1_GiB, .max_segments = 64}));
  std::optional<symmetric_channel> across;
  if (at.ranks->node_count() > 1) across.emplace(heap.region());
  const ep::job_shape job{.ranks = at.ranks->size(),
                          .nodes = at.ranks->node_count(),
                          .granularity = heap.region().granularity()};
  const auto add = [](const ep::heap_footprint& a, const ep::heap_footprint& b) {
    return ep::heap_footprint{a.device_bytes + b.device_bytes, a.host_bytes + b.host_bytes};
  };
  const ep::heap_footprint base = taken_of(heap);  // the channel's
  std::mt19937_64 random(3);
  for (int round = 0; round < 8; ++round) {
    const bool scaled = random() % 2 == 0;
    const ep::exchange_options options{
        .experts = job.ranks * static_cast<int>(1 + random() % 3),
        .top_k = 1 + static_cast<int>(random() % 5),
        .hidden = 128 * (1 + random() % 20),
        .rows = scaled ? ep::payload::fp8 : ep::payload::bf16,
        .quantize = scaled && random() % 2 == 0,
        .arranged = random() % 2 == 0 ? ep::layout::by_source : ep::layout::by_expert,
        .expert_alignment = 1 + random() % 70,
        .max_tokens = 1 + random() % 300,
        .device_rows = random() % 2 * 77,
        .device_expert_rows = random() % 2 * 99,
        .adapt_steps = 1 + static_cast<int>(random() % 2),
        .sms = 1};
    {
      std::optional<ep::exchange> made;
      across ? made.emplace(heap, *across, options) : made.emplace(heap, options);
      auto expected = add(base, ep::footprint(options, job));
      EXPECT_EQ(text_of(taken_of(heap)), text_of(expected));
      const ep::plan plan = made->make_plan();
      expected = add(expected, ep::plan_footprint(options, job));
      EXPECT_EQ(text_of(taken_of(heap)), text_of(expected));
    }
    const ep::low_latency_options few{.experts = options.experts,
                                      .top_k = options.top_k,
                                      .hidden = options.hidden,
                                      .rows = options.rows,
                                      .quantize = options.quantize,
                                      .arranged = options.arranged,
                                      .max_tokens = 1 + random() % 40,
                                      .sms = 1};
    {
      std::optional<ep::low_latency_exchange> made;
      across ? made.emplace(heap, *across, few) : made.emplace(heap, few);
      EXPECT_EQ(text_of(taken_of(heap)), text_of(add(base, ep::footprint(few, job))));
    }
    EXPECT_EQ(text_of(taken_of(heap)), text_of(base));
    heap.trim();
  }
  if (across) across->close();
  heap.close();
}

void what_does_not_fit_leaves_no_segments_behind(const rank_context& at) {
  symmetric_heap heap(at.make({.reserve = 256_MiB, .max_segments = 64}),
                      {.growth_step = 2_MiB, .device_limit = 64_MiB, .host_limit = 2_MiB});
  if (at.ranks->node_count() > 1) return;
  const auto said = thrown_by_all(*at.ranks, [&] {
    ep::exchange(heap, {.experts = at.ranks->size(),
                        .top_k = 1,
                        .hidden = 4096,
                        .max_tokens = 1024,
                        .device_rows = 512,
                        .sms = 1});
  });
  EXPECT_THAT(said, HasSubstr("host_limit"));
  EXPECT_EQ(heap.report().allocated_bytes, 0u);
  const std::size_t size = heap.region().size();
  (void)heap.allocate(4_MiB, nullptr, {.tiers = tier_policy::device_only});
  EXPECT_EQ(heap.region().size(), size) << "what was taken is there for others";
  heap.close();
}

void random_exchanges_are_exact(const rank_context& at) {
  run_random_exchanges(at, 12, 8);
}

}  // namespace

void run_random_exchanges(const rank_context& at, std::size_t count, std::uint64_t seed,
                          const channel_options& across) {
  std::mt19937_64 same(seed);
  std::mt19937_64 own(seed + 1 + static_cast<std::uint64_t>(at.ranks->rank().value));
  for (std::size_t done = 0; done < count;) {
    ep::exchange_options options;
    options.experts = 1 + static_cast<int>(same() % 8);
    options.top_k = 1 + static_cast<int>(same() % 8);
    options.hidden = 128 * (1 + same() % 12);
    options.rows = same() % 2 == 0 ? ep::payload::bf16 : ep::payload::fp8;
    options.quantize = options.rows == ep::payload::fp8 && same() % 2 == 0;
    options.arranged = same() % 2 == 0 ? ep::layout::by_source : ep::layout::by_expert;
    options.expert_alignment = 1 + same() % 20;
    options.max_tokens = 1 + same() % 120;
    options.device_rows = same() % 3 == 0 ? same() % 60 : 0;
    options.device_expert_rows = same() % 3 == 0 ? same() % 90 : 0;
    options.adapt_steps = 1 + static_cast<int>(same() % 3);
    options.sms = 1 + static_cast<int>(same() % 8);
    options.local_sms = static_cast<int>(same() % 20);
    auto script = script_for(at, options);
    ep_rank mine(at, script.options, across);
    for (int round = 0; round < 4 && done < count; ++round, ++done) {
      script.seed = same();
      script.hot = same() % 3 == 0 ? 1 : 0;
      script.masked = same() % 2 == 0 ? 3 : 0;
      for (std::size_t& tokens : script.counts) tokens = same() % (script.options.max_tokens + 1);
      at.on->launch(mine.stream(), [us = own() % 300] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
        while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
      });
      mine.run(script, same() % 2 == 0);
      if (same() % 4 == 0) mine.run_backward(script);
      if (same() % 4 == 0) mine.exchange().adapt();
    }
  }
}

const std::vector<symmetric_case>& ep_cases() {
#define EVMM_CASE(name) \
  { #name, &(name) }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(rows_arrive_and_are_combined),
      EVMM_CASE(fp8_rows_bring_their_scales),
      EVMM_CASE(bf16_rows_are_quantised_as_they_are_sent),
      EVMM_CASE(rows_lie_in_aligned_groups_by_expert),
      EVMM_CASE(groups_beyond_the_expected_load_lie_in_host_memory),
      EVMM_CASE(gradients_go_the_way_back),
      EVMM_CASE(a_captured_graph_exchanges_what_is_there_when_it_runs),
      EVMM_CASE(what_exceeds_the_expected_load_lies_in_host_memory),
      EVMM_CASE(a_plan_sends_other_rows_by_the_same_routing),
      EVMM_CASE(wrong_exchanges_are_refused),
      EVMM_CASE(what_is_taken_can_be_told_before),
      EVMM_CASE(what_does_not_fit_leaves_no_segments_behind),
      EVMM_CASE(random_exchanges_are_exact),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
