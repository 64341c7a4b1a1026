// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"
#include "tests/support/ep_low_latency_rank.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/ep/low_latency.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <optional>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

using low_latency = ep::low_latency_exchange;

void low_latency_rows_arrive_and_are_combined(const rank_context& at) {
  struct given {
    ep::payload rows;
    bool quantize;
  };
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    for (const auto [rows, quantize] :
         {given{ep::payload::bf16, false}, {ep::payload::fp8, true}, {ep::payload::fp8, false}}) {
      auto script = script_for(at, {.experts = 3,
                                    .top_k = 3,
                                    .hidden = 384,
                                    .rows = rows,
                                    .quantize = quantize,
                                    .arranged = arranged,
                                    .max_tokens = 30,
                                    .sms = 3});
      script.distinct = true;
      low_latency_rank mine(at, script.options);
      for (std::uint64_t round = 0; round < 7; ++round) {
        script.seed = 50 + round;
        script.tells_most = round % 2 == 1;
        script.masked = round == 2 ? 3 : round == 5 ? 1 : 0;  // 1: all choose nobody
        script.hot = round == 6 ? 2 : 0;
        for (std::size_t r = 0; r < script.counts.size(); ++r) {
          script.counts[r] = round == 3 ? 0 : round == 4 ? (r * 17) % 31 : 30;
        }
        mine.run(script);
      }
    }
  }
}

/// As many tokens as a rank may send within its node.
void the_largest_low_latency_batches_fit(const rank_context& at) {
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    const auto nodes = static_cast<std::size_t>(at.ranks->node_count());
    auto script = script_for(at, {.experts = 2,
                                  .top_k = 2,
                                  .hidden = 128,
                                  .arranged = arranged,
                                  .max_tokens = 1024 / nodes,
                                  .sms = 2});
    script.distinct = true;
    script.seed = 40;
    low_latency_rank mine(at, script.options);
    mine.run(script);
  }
}

/// Both verified; `order` says which is waited for first, and which is summed first.
void run_two_at_once(low_latency_rank& mine, const ep_script& first, const ep_script& second,
                     unsigned order) {
  auto& exchange = mine.exchange();
  const ep_script* const scripts[] = {&first, &second};
  low_latency::round rounds[2];
  ep::low_latency_received got[2];
  const ep::tokens seconds = mine.upload(second);
  mine.save();
  rounds[0] = exchange.issue_dispatch(mine.upload(first), mine.stream());
  mine.restore();  // to the same memory
  rounds[1] = exchange.issue_dispatch(seconds, mine.stream());
  EXPECT_THAT(thrown_by([&] { exchange.issue_dispatch(seconds, mine.stream()); }),
              HasSubstr("whose wait_dispatch() is missing"));
  EXPECT_THAT(thrown_by([&] { exchange.issue_combine(rounds[0], mine.stream()); }),
              HasSubstr("which is not waited for yet"));
  const auto turn = [&](unsigned bit, unsigned i) { return (order >> bit & 1) ^ i; };
  for (const unsigned i : {0u, 1u}) {
    const unsigned which = turn(0, i);
    got[which] = exchange.wait_dispatch(rounds[which], mine.stream());
  }
  for (const unsigned i : {0u, 1u}) {
    mine.expect_received(*scripts[i], got[i]);
    mine.write_outputs(*scripts[i], rounds[i], got[i]);
  }
  for (const unsigned i : {0u, 1u}) exchange.issue_combine(rounds[turn(1, i)], mine.stream());
  for (const unsigned i : {0u, 1u}) {
    const unsigned which = turn(2, i);
    exchange.wait_combine(rounds[which], mine.out(static_cast<int>(which)), nullptr, mine.stream());
  }
  for (const int which : {0, 1}) {
    EXPECT_EQ(mine.sums(*scripts[which], which), combined(*scripts[which], mine.me(), {}));
  }
  EXPECT_THAT(
      thrown_by([&] { exchange.wait_combine(rounds[0], mine.out(0), nullptr, mine.stream()); }),
      HasSubstr("which is over"));
}

void two_low_latency_dispatches_are_under_way(const rank_context& at) {
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    auto first = script_for(at, {.experts = 4,
                                 .top_k = 4,
                                 .hidden = 256,
                                 .arranged = arranged,
                                 .max_tokens = 33,
                                 .sms = 2});
    first.distinct = true;
    auto second = first;
    low_latency_rank mine(at, first.options);
    for (unsigned order = 0; order < 8; ++order) {
      first.seed = 60 + order;
      second.seed = 70 + order;
      second.counts.back() = order;
      run_two_at_once(mine, first, second, order);
    }
    // The first is not combined, the second not waited for.
    low_latency::round a;
    mine.expect_received(first, mine.exchange().dispatch(mine.upload(first), a, mine.stream()));
    const ep::tokens from = mine.upload(second);
    const auto b = mine.exchange().issue_dispatch(from, mine.stream());
    EXPECT_THAT(thrown_by([&] { mine.exchange().issue_dispatch(from, mine.stream()); }),
                HasSubstr("which peers may still read"));
    mine.expect_received(second, mine.exchange().wait_dispatch(b, mine.stream()));
    mine.run(first);
  }
}

/// Between issue and wait the stream has nothing to wait for.
void the_stream_is_free_while_others_are_late(const rank_context& at) {
  auto script =
      script_for(at, {.experts = 2, .top_k = 3, .hidden = 128, .max_tokens = 20, .sms = 2});
  script.seed = 84;
  low_latency_rank mine(at, script.options);
  const auto first_alone = [&](const auto& issue) {
    if (mine.me() == 0) {
      issue();
      at.on->synchronize(mine.stream());
    }
    at.ranks->barrier("the first rank's stream has passed");
    if (mine.me() != 0) issue();
  };
  low_latency::round of;
  const ep::tokens from = mine.upload(script);
  first_alone([&] { of = mine.exchange().issue_dispatch(from, mine.stream()); });
  const auto got = mine.exchange().wait_dispatch(of, mine.stream());
  mine.expect_received(script, got);
  mine.write_outputs(script, of, got);
  first_alone([&] { mine.exchange().issue_combine(of, mine.stream()); });
  mine.exchange().wait_combine(of, mine.out(0), nullptr, mine.stream());
  EXPECT_EQ(mine.sums(script, 0), combined(script, mine.me(), {}));
}

void a_captured_graph_replays_low_latency_rounds(const rank_context& at) {
  auto script =
      script_for(at, {.experts = 4, .top_k = 2, .hidden = 256, .max_tokens = 25, .sms = 2});
  script.seed = 90;
  low_latency_rank mine(at, script.options);
  mine.run(script);
  const ep::tokens from = mine.upload(script);
  low_latency::round of;
  if (at.ranks->node_count() > 1) {
    scoped_capture graph(*at.on, mine.stream());
    EXPECT_THAT(thrown_by([&] { mine.exchange().issue_dispatch(from, mine.stream()); }),
                HasSubstr("what crosses nodes cannot be captured"));
    graph.end();
    mine.run(script);
    return;
  }
  scoped_capture graph(*at.on, mine.stream());
  const auto got = mine.exchange().dispatch(from, of, mine.stream());
  mine.exchange().combine(of, mine.out(0), nullptr, mine.stream());
  graph.end();
  for (std::uint64_t replay = 0; replay < 4; ++replay) {
    script.seed = 91 + replay;
    mine.upload(script);
    mine.write_outputs(script, of, got);
    graph.launch(mine.stream());
    mine.expect_received(script, got);
    EXPECT_EQ(mine.sums(script, 0), combined(script, mine.me(), {}));
    at.ranks->barrier("rows were looked at behind the combine, when peers may write them again");
    auto eager = script;
    eager.seed = 190 + replay;
    if (replay % 2 == 0) mine.run(eager);
    at.ranks->barrier(
        "results are written ahead of the dispatch, when peers may still read others");
  }
}

/// Groups have room for each token once: what a router that chooses twice sends beyond is left out.
void choices_beyond_a_groups_room_are_left_out(const rank_context& at) {
  auto script = script_for(at, {.experts = 1,
                                .top_k = 2,
                                .hidden = 128,
                                .arranged = ep::layout::by_expert,
                                .max_tokens = 10,
                                .sms = 1});
  low_latency_rank mine(at, script.options);
  ep::tokens from = mine.upload(script);
  std::vector<std::int64_t> ids(20, at.ranks->rank().value);  // each twice to itself
  mine.put(const_cast<std::int64_t*>(from.topk_ids), ids);
  low_latency::round of;
  const auto got = mine.exchange().dispatch(from, of, mine.stream());
  const std::size_t room = 10 * static_cast<std::size_t>(at.ranks->size());
  const auto came = static_cast<std::int32_t>(std::min<std::size_t>(20, room));
  EXPECT_EQ(mine.get(got.expert_tokens, 1)[0], came);
  mine.exchange().combine(of, mine.out(0), nullptr, mine.stream());
  at.on->synchronize(mine.stream());
  mine.exchange().check();
}

void wrong_low_latency_calls_are_refused(const rank_context& at) {
  symmetric_heap heap(at.make({.reserve = 256_MiB}));
  const auto nodes = static_cast<std::size_t>(at.ranks->node_count());
  std::optional<symmetric_channel> across;
  if (nodes > 1) across.emplace(heap.region());
  std::optional<low_latency> made;
  const auto make = [&](const ep::low_latency_options& options) -> low_latency& {
    return across ? made.emplace(heap, *across, options) : made.emplace(heap, options);
  };
  const ep::low_latency_options good{.experts = at.ranks->size(),
                                     .top_k = 1,
                                     .hidden = 128,
                                     .rows = ep::payload::bf16,
                                     .quantize = false,
                                     .max_tokens = 4,
                                     .sms = 1};
  const auto refused = [&](const ep::low_latency_options& options, const std::string& why) {
    EXPECT_THAT(thrown_by([&] { make(options); }), HasSubstr(why));
  };
  auto bad = good;
  bad.max_tokens = 1024 / nodes + 1;
  refused(bad, "max_tokens is " + std::to_string(bad.max_tokens));
  if (nodes > 1) {
    refused(bad,
            std::to_string(nodes * bad.max_tokens) + " over " + std::to_string(nodes) + " nodes");
    EXPECT_THAT(thrown_by([&] { low_latency(heap, good); }),
                HasSubstr("give the channel that carries what crosses nodes"));
  }
  bad = good;
  bad.quantize = true;
  refused(bad, "quantize is set");
  bad = good;
  bad.experts = 0;
  refused(bad, "experts is 0");
  low_latency& exchange = make(good);
  const native_stream stream = at.on->create_stream(at.device);
  EXPECT_THAT(thrown_by([&] { exchange.issue_dispatch({.count = 5}, stream); }),
              HasSubstr("5 tokens: the exchange was made for 4"));
  EXPECT_THAT(thrown_by([&] { exchange.issue_combine({}, stream); }), HasSubstr("dispatch 0"));
  at.on->destroy_stream(stream);
  if (across) across->close();
  at.ranks->barrier("refused");
}

/// Bytes that cross nodes go by the most that a rank gives, where that is told.
void few_tokens_cross_in_few_bytes(const rank_context& at) {
  auto script =
      script_for(at, {.experts = 4, .top_k = 4, .hidden = 256, .max_tokens = 64, .sms = 2});
  script.seed = 95;
  std::fill(script.counts.begin(), script.counts.end(), 2);
  script.counts.back() = 4;
  low_latency_rank mine(at, script.options);
  const auto crossed = [&] {
    const auto sent = [&] { return mine.across() ? mine.across()->statistics().link_bytes : 0; };
    const auto before = sent();
    mine.run(script);
    at.ranks->barrier("a round is over");
    return sent() - before;
  };
  const auto all = crossed();
  script.tells_most = true;
  const auto told = crossed();
  EXPECT_EQ(told, all / 16);
  EXPECT_EQ(all > 0, at.ranks->node_count() > 1);
  ep::tokens from = mine.upload(script);
  from.most = from.count - 1;
  EXPECT_THAT(thrown_by([&] { mine.exchange().issue_dispatch(from, mine.stream()); }),
              HasSubstr("tokens where ranks give " + std::to_string(from.most) + " at most"));
  from.most = 65;
  EXPECT_THAT(thrown_by([&] { mine.exchange().issue_dispatch(from, mine.stream()); }),
              HasSubstr("give 65 at most: the exchange was made for 64"));
}

void random_low_latency_rounds_are_exact(const rank_context& at) {
  run_random_low_latency(at, 10, 9);
}

}  // namespace

void run_random_low_latency(const rank_context& at, std::size_t count, std::uint64_t seed,
                            const channel_options& across) {
  std::mt19937_64 same(seed);
  std::mt19937_64 own(seed + 1 + static_cast<std::uint64_t>(at.ranks->rank().value));
  for (std::size_t done = 0; done < count;) {
    ep::exchange_options options;
    options.experts = 1 + static_cast<int>(same() % 6);
    options.arranged = same() % 2 == 0 ? ep::layout::by_source : ep::layout::by_expert;
    options.top_k =
        options.arranged == ep::layout::by_expert ? 1 : 1 + static_cast<int>(same() % 8);
    options.hidden = 128 * (1 + same() % 10);
    options.rows = same() % 2 == 0 ? ep::payload::bf16 : ep::payload::fp8;
    options.quantize = options.rows == ep::payload::fp8 && same() % 2 == 0;
    options.max_tokens = 1 + same() % 60;
    options.sms = 1 + static_cast<int>(same() % 8);
    auto script = script_for(at, options);
    script.distinct = true;
    low_latency_rank mine(at, script.options, std::chrono::seconds(30), across);
    for (int round = 0; round < 5 && done < count; ++round, ++done) {
      script.seed = same();
      script.tells_most = same() % 2 == 0;
      script.hot = same() % 3 == 0 ? 1 : 0;
      script.masked = same() % 2 == 0 ? 3 : 0;
      for (std::size_t& tokens : script.counts) tokens = same() % (options.max_tokens + 1);
      at.on->launch(mine.stream(), [us = own() % 300] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
        while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
      });
      if (same() % 3 != 0) {
        mine.run(script);
        continue;
      }
      auto second = script;
      second.seed = same();
      second.tells_most = same() % 2 == 0;
      for (std::size_t& tokens : second.counts) tokens = same() % (options.max_tokens + 1);
      run_two_at_once(mine, script, second, static_cast<unsigned>(same() % 8));
    }
  }
}

const std::vector<symmetric_case>& low_latency_cases() {
#define EVMM_CASE(name) \
  { #name, &(name) }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(low_latency_rows_arrive_and_are_combined),
      EVMM_CASE(the_largest_low_latency_batches_fit),
      EVMM_CASE(two_low_latency_dispatches_are_under_way),
      EVMM_CASE(the_stream_is_free_while_others_are_late),
      EVMM_CASE(a_captured_graph_replays_low_latency_rounds),
      EVMM_CASE(choices_beyond_a_groups_room_are_left_out),
      EVMM_CASE(few_tokens_cross_in_few_bytes),
      EVMM_CASE(wrong_low_latency_calls_are_refused),
      EVMM_CASE(random_low_latency_rounds_are_exact),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
