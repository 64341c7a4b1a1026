// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"
#include "tests/support/ep_rank.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/ep/low_latency.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

using low_latency = ep::low_latency_exchange;

/// One rank's side, for scripts whose options a low-latency exchange has too.
class low_latency_rank final : public ep_tensors {
 public:
  low_latency_rank(const rank_context& at, const ep::exchange_options& options,
                   std::chrono::milliseconds timeout = std::chrono::seconds(30))
      : ep_tensors(at, options, 2_GiB, 16_MiB),
        exchange_(heap_, {.experts = options.experts,
                          .top_k = options.top_k,
                          .hidden = options.hidden,
                          .rows = options.rows,
                          .quantize = options.quantize,
                          .arranged = options.arranged,
                          .max_tokens = options.max_tokens,
                          .sms = options.sms,
                          .timeout = timeout}) {
    for (auto& out : out_) out = {heap_, options.max_tokens * options.hidden};
  }
  ~low_latency_rank() override { at_.on->synchronize(stream_); }

  low_latency& exchange() { return exchange_; }
  std::uint16_t* out(int which) const { return out_[which].local(); }

  /// Where each received row lies, in the order of rows_received().
  std::vector<std::size_t> places(const ep_script& script) const {
    std::vector<std::size_t> all;
    std::vector<std::size_t> next(static_cast<std::size_t>(script.ranks));
    for (const ep_row& row : rows_received(script, me())) {
      const auto source = static_cast<std::size_t>(row.source);
      all.push_back(source * script.options.max_tokens + next[source]++);
    }
    return all;
  }

  /// Rows of sources whose bit is in `without` did not come.
  void expect_received(const ep_script& script, const ep::low_latency_received& got,
                       std::uint64_t without = 0) {
    const auto rows = rows_received(script, me());
    const auto at = places(script);
    const auto top_k = static_cast<std::size_t>(script.options.top_k);
    const int local = script.options.experts / script.ranks;
    const std::size_t all = static_cast<std::size_t>(script.ranks) * script.options.max_tokens;
    std::vector<std::int32_t> source_rows(static_cast<std::size_t>(script.ranks));
    const auto experts = get(got.experts, all * top_k);
    const auto weights = get(got.weights, all * top_k);
    const auto tokens = get(got.tokens, all);
    const std::size_t x_rows = script.by_expert() ? all * static_cast<std::size_t>(local) : all;
    const auto x = get(static_cast<const std::byte*>(got.x), x_rows * script.row_bytes());
    const auto scales = get(got.scales, script.scaled() ? x_rows * script.scale_count() : 0);
    const ep_sent sent(script);
    std::vector<std::int32_t> group(static_cast<std::size_t>(local));
    std::vector<std::int32_t> expert_rows;
    if (script.by_expert()) expert_rows = get(got.expert_rows, all * top_k);
    // Groups are filled in the order of places.
    std::vector<std::size_t> in_order(rows.size());
    std::iota(in_order.begin(), in_order.end(), std::size_t{0});
    std::sort(in_order.begin(), in_order.end(),
              [&](std::size_t a, std::size_t b) { return at[a] < at[b]; });
    std::size_t wrong = 0;
    for (const std::size_t row : in_order) {
      const auto source = static_cast<std::size_t>(rows[row].source);
      if ((without >> source & 1) != 0) continue;
      ++source_rows[source];
      const std::size_t t = rows[row].token;
      const auto ids = script.ids(rows[row].source);
      const auto given = script.weights(rows[row].source);
      wrong += tokens[at[row]] != static_cast<std::int32_t>(t);
      if (!script.by_expert()) wrong += !sent.is_row(rows[row], x, scales, at[row]);
      for (std::size_t k = 0; k < top_k; ++k) {
        const std::int64_t id = ids[t * top_k + k];
        const bool here = id >= 0 && id / local == me();
        const std::size_t choice = at[row] * top_k + k;
        wrong += experts[choice] != (here ? id % local : -1);
        wrong += weights[choice] != (here ? given[t * top_k + k] : 0);
        if (!here || !script.by_expert()) continue;
        const auto expert = static_cast<std::size_t>(id % local);
        const std::size_t place = expert * all + static_cast<std::size_t>(group[expert]++);
        wrong += expert_rows[choice] != static_cast<std::int32_t>(place);
        wrong += !sent.is_row(rows[row], x, scales, place);
      }
    }
    EXPECT_EQ(wrong, 0u);
    EXPECT_EQ(get(got.source_rows, source_rows.size()), source_rows);
    if (script.by_expert()) {
      EXPECT_EQ(get(got.expert_tokens, group.size()), group);
    }
  }

  void write_outputs(const ep_script& script, const low_latency::round& of,
                     const ep::low_latency_received& got) {
    const std::size_t hidden = script.options.hidden;
    const auto top_k = static_cast<std::size_t>(script.options.top_k);
    const auto at = places(script);
    const std::size_t all = static_cast<std::size_t>(script.ranks) * script.options.max_tokens;
    const std::size_t groups =
        script.by_expert() ? static_cast<std::size_t>(script.options.experts / script.ranks) : 1;
    std::vector<std::uint16_t> made(groups * all * hidden, 0x7fff);
    const auto write = [&](std::size_t row, const std::vector<std::uint16_t>& one) {
      std::copy(one.begin(), one.end(), made.begin() + static_cast<std::ptrdiff_t>(row * hidden));
    };
    std::vector<std::int32_t> experts, expert_rows;
    if (script.by_expert()) {
      experts = get(got.experts, all * top_k);
      expert_rows = get(got.expert_rows, all * top_k);
    }
    for (std::size_t row = 0; row < at.size(); ++row) {
      if (!script.by_expert()) write(at[row], script.made(me(), row));
      for (std::size_t k = 0; k < top_k && script.by_expert(); ++k) {
        const std::size_t choice = at[row] * top_k + k;
        if (experts[choice] < 0) continue;
        write(static_cast<std::size_t>(expert_rows[choice]),
              script.made(me(), ep_script::choice(row, k)));
      }
    }
    put(static_cast<std::uint16_t*>(exchange_.combine_buffer(of)), made);
  }

  std::vector<std::uint16_t> sums(const ep_script& script, int which) {
    return get(out(which), script.counts[static_cast<std::size_t>(me())] * script.options.hidden);
  }

  /// A whole round, verified.
  void run(const ep_script& script) {
    low_latency::round of;
    const auto got = exchange_.dispatch(upload(script), of, stream_);
    EXPECT_EQ(of.tokens(), script.counts[static_cast<std::size_t>(me())]);
    expect_received(script, got);
    write_outputs(script, of, got);
    exchange_.combine(of, out(0), nullptr, stream_);
    EXPECT_EQ(sums(script, 0), combined(script, me(), {}));
    exchange_.check();
    EXPECT_EQ(exchange_.dead_ranks(), 0u);
  }

 private:
  low_latency exchange_;
  symmetric_buffer<std::uint16_t> out_[2];
};

void low_latency_rows_arrive_and_are_combined(const rank_context& at) {
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    for (const auto rows : {ep::payload::bf16, ep::payload::fp8}) {
      auto script = script_for(at, {.experts = 3,
                                    .top_k = 3,
                                    .hidden = 640,
                                    .rows = rows,
                                    .quantize = rows == ep::payload::fp8,
                                    .arranged = arranged,
                                    .max_tokens = 70,
                                    .sms = 3});
      script.distinct = true;
      low_latency_rank mine(at, script.options);
      for (std::uint64_t round = 0; round < 5; ++round) {
        script.seed = 50 + round;
        script.masked = round == 2 ? 3 : 0;
        for (std::size_t r = 0; r < script.counts.size(); ++r) {
          script.counts[r] = round == 3 ? 0 : round == 4 ? (r * 31) % 71 : 70;
        }
        mine.run(script);
      }
    }
  }
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
    for (std::uint64_t round = 0; round < 3; ++round) {
      first.seed = 60 + round;
      second.seed = 70 + round;
      auto& exchange = mine.exchange();
      const auto a = exchange.issue_dispatch(mine.upload(first), mine.stream());
      at.on->synchronize(mine.stream());  // the tokens' memory is used again
      const auto b = exchange.issue_dispatch(mine.upload(second), mine.stream());
      EXPECT_THAT(thrown_by([&] { exchange.issue_dispatch(mine.upload(second), mine.stream()); }),
                  HasSubstr("whose wait_dispatch() is missing"));
      EXPECT_THAT(thrown_by([&] { exchange.issue_combine(a, mine.stream()); }),
                  HasSubstr("which is not waited for yet"));
      const auto got_a = exchange.wait_dispatch(a, mine.stream());
      const auto got_b = exchange.wait_dispatch(b, mine.stream());
      mine.expect_received(first, got_a);
      mine.expect_received(second, got_b);
      mine.write_outputs(first, a, got_a);
      exchange.issue_combine(a, mine.stream());
      mine.write_outputs(second, b, got_b);
      exchange.issue_combine(b, mine.stream());
      exchange.wait_combine(a, mine.out(0), nullptr, mine.stream());
      exchange.wait_combine(b, mine.out(1), nullptr, mine.stream());
      EXPECT_EQ(mine.sums(first, 0), combined(first, mine.me(), {}));
      EXPECT_EQ(mine.sums(second, 1), combined(second, mine.me(), {}));
      EXPECT_THAT(thrown_by([&] { exchange.wait_combine(a, mine.out(0), nullptr, mine.stream()); }),
                  HasSubstr("which is over"));
    }
  }
}

void a_rank_that_does_not_come_is_left_out(const rank_context& at) {
  if (at.ranks->size() == 1) return;
  auto script =
      script_for(at, {.experts = 2, .top_k = 3, .hidden = 128, .max_tokens = 20, .sms = 2});
  script.seed = 80;
  low_latency_rank mine(at, script.options, std::chrono::milliseconds(400));
  mine.run(script);
  const int lost = at.ranks->size() - 1;
  const std::uint64_t mask = std::uint64_t{1} << lost;
  at.ranks->barrier("one rank leaves");
  if (mine.me() != lost) {
    for (std::uint64_t round = 0; round < 4; ++round) {
      script.seed = 81 + round;
      low_latency::round of;
      const auto begin = std::chrono::steady_clock::now();
      const auto got = mine.exchange().dispatch(mine.upload(script), of, mine.stream());
      mine.expect_received(script, got, mask);
      mine.write_outputs(script, of, got);
      mine.exchange().combine(of, mine.out(0), nullptr, mine.stream());
      EXPECT_EQ(mine.sums(script, 0), combined(script, mine.me(), {}, true, mask));
      EXPECT_EQ(mine.exchange().dead_ranks(), mask);
      // Its death costs one timeout, not one a call.
      const auto took = std::chrono::steady_clock::now() - begin;
      if (round > 0 && at.on->info().kind == driver_kind::cuda) {
        EXPECT_LT(took, std::chrono::milliseconds(300));
      }
    }
  }
  at.ranks->barrier("the others are done");
}

void a_captured_graph_replays_low_latency_rounds(const rank_context& at) {
  auto script =
      script_for(at, {.experts = 4, .top_k = 2, .hidden = 256, .max_tokens = 25, .sms = 2});
  script.seed = 90;
  low_latency_rank mine(at, script.options);
  mine.run(script);
  const ep::tokens from = mine.upload(script);
  low_latency::round of;
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
  const ep::low_latency_options good{.experts = at.ranks->size(),
                                     .top_k = 1,
                                     .hidden = 128,
                                     .rows = ep::payload::bf16,
                                     .quantize = false,
                                     .max_tokens = 4,
                                     .sms = 1};
  const auto refused = [&](const ep::low_latency_options& options, const std::string& why) {
    EXPECT_THAT(thrown_by([&] { low_latency(heap, options); }), HasSubstr(why));
  };
  auto bad = good;
  bad.max_tokens = 1025;
  refused(bad, "max_tokens is 1025");
  bad = good;
  bad.quantize = true;
  refused(bad, "quantize is set");
  bad = good;
  bad.experts = 0;
  refused(bad, "experts is 0");
  low_latency exchange(heap, good);
  const native_stream stream = at.on->create_stream(at.device);
  EXPECT_THAT(thrown_by([&] { exchange.issue_dispatch({.count = 5}, stream); }),
              HasSubstr("5 tokens: the exchange was made for 4"));
  EXPECT_THAT(thrown_by([&] { exchange.issue_combine({}, stream); }), HasSubstr("dispatch 0"));
  at.on->destroy_stream(stream);
  at.ranks->barrier("refused");
}

void random_low_latency_rounds_are_exact(const rank_context& at) {
  run_random_low_latency(at, 15, 9);
}

}  // namespace

void run_random_low_latency(const rank_context& at, std::size_t count, std::uint64_t seed) {
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
    low_latency_rank mine(at, script.options);
    for (int round = 0; round < 5 && done < count; ++round, ++done) {
      script.seed = same();
      script.hot = same() % 3 == 0 ? 1 : 0;
      script.masked = same() % 2 == 0 ? 3 : 0;
      for (std::size_t& tokens : script.counts) tokens = same() % (options.max_tokens + 1);
      at.on->launch(mine.stream(), [us = own() % 300] {
        const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(us);
        while (std::chrono::steady_clock::now() < end) std::this_thread::yield();
      });
      mine.run(script);
    }
  }
}

const std::vector<symmetric_case>& low_latency_cases() {
#define EVMM_CASE(name) \
  { #name, &(name) }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(low_latency_rows_arrive_and_are_combined),
      EVMM_CASE(two_low_latency_dispatches_are_under_way),
      EVMM_CASE(a_rank_that_does_not_come_is_left_out),
      EVMM_CASE(a_captured_graph_replays_low_latency_rounds),
      EVMM_CASE(choices_beyond_a_groups_room_are_left_out),
      EVMM_CASE(wrong_low_latency_calls_are_refused),
      EVMM_CASE(random_low_latency_rounds_are_exact),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
