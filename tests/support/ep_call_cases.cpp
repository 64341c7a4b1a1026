// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"
#include "tests/support/ep_rank.hpp"
#include "tests/support/scoped_capture.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/ep/exchange.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>
#include <vector>

// Which calls of an exchange go together, and what stands between them: plans, graphs, adapt().

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

ep_script small_script(const rank_context& at, ep::layout arranged) {
  auto script = script_for(at, {.experts = 2,
                                .top_k = 2,
                                .hidden = 256,
                                .arranged = arranged,
                                .max_tokens = 40,
                                .sms = 2,
                                .timeout = std::chrono::seconds(5)});
  script.seed = 40;
  return script;
}

void plans_that_are_none_of_this_dispatch_are_refused(const rank_context& at) {
  const auto script = small_script(at, ep::layout::by_source);
  ep_rank mine(at, script.options);
  ep_rank other(at, script.options);
  auto& exchange = mine.exchange();
  const native_stream stream = mine.stream();
  ep::tokens from = mine.upload(script);
  EXPECT_THAT(thrown_by([&] { exchange.dispatch(from, other.plan(), stream); }),
              HasSubstr("a plan that this exchange did not make"));
  // Without tokens the count alone would tell nothing.
  from.count = 0;
  ep::plan empty = exchange.make_plan();
  const std::string unfilled = "a plan that no dispatch has filled";
  EXPECT_THAT(thrown_by([&] { exchange.dispatch_again(from, empty, stream); }),
              HasSubstr(unfilled));
  EXPECT_THAT(thrown_by([&] { exchange.combine(empty, mine.out(), nullptr, stream); }),
              HasSubstr(unfilled));
  EXPECT_THAT(thrown_by([&] { exchange.combine_backward(from, empty, nullptr, stream); }),
              HasSubstr(unfilled));
  EXPECT_THAT(
      thrown_by([&] { exchange.dispatch_backward(empty, mine.out(), nullptr, nullptr, stream); }),
      HasSubstr(unfilled));
  const ep::plan moved = std::move(empty);
  // NOLINTBEGIN(bugprone-use-after-move): that is the point
  EXPECT_THAT(thrown_by([&] { exchange.combine(empty, mine.out(), nullptr, stream); }),
              HasSubstr("or that was moved from"));
  EXPECT_EQ(empty.tokens(), 0u);
  // NOLINTEND(bugprone-use-after-move)
  mine.run(script, false);
  other.run(script, false);
}

void sums_by_expert_are_those_of_the_last_dispatch(const rank_context& at) {
  for (const auto arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    const auto first = small_script(at, arranged);
    auto second = first;
    second.seed = 41;
    ep_rank mine(at, first.options);
    auto& exchange = mine.exchange();
    ep::plan other = exchange.make_plan();
    const auto got = exchange.dispatch(mine.upload(first), mine.plan(), mine.stream());
    mine.expect_received(first, got);
    mine.write_outputs(first);
    exchange.dispatch(mine.upload(second), other, mine.stream());
    const auto combine = [&] { exchange.combine(mine.plan(), mine.out(), nullptr, mine.stream()); };
    if (arranged == ep::layout::by_expert) {
      const std::string why = "sum by the plan of call 1 that sent rows";
      EXPECT_THAT(thrown_by(combine), HasSubstr(why));
      EXPECT_THAT(thrown_by([&] {
                    exchange.dispatch_backward(mine.plan(), mine.out(), nullptr, nullptr,
                                               mine.stream());
                  }),
                  HasSubstr(why));
    } else {
      // Its rows lie where they lay.
      combine();
      EXPECT_EQ(mine.get(mine.out(), first.counts[0] * first.options.hidden),
                combined(first, mine.me(), {}));
      if (at.ranks->node_count() > 1) {
        const ep::tokens from = mine.upload(first);
        EXPECT_THAT(thrown_by([&] {
                      exchange.dispatch_backward(mine.plan(), mine.out(), from.topk_ids,
                                                 exchange.weight_gradients(), mine.stream());
                    }),
                    HasSubstr("sum by the plan of call 1"));
      }
    }
    mine.run(first, true);
  }
}

void counts_are_those_of_a_dispatch_that_ran(const rank_context& at) {
  if (at.ranks->node_count() > 1) GTEST_SKIP() << "what crosses nodes is not captured";
  auto script = small_script(at, ep::layout::by_source);
  ep_rank mine(at, script.options);
  mine.run(script, false);
  const ep::tokens from = mine.upload(script);
  scoped_capture graph(*at.on, mine.stream());
  mine.exchange().dispatch(from, mine.plan(), mine.stream());
  graph.end();
  const std::size_t rows = rows_received(script, mine.me()).size();
  EXPECT_EQ(mine.exchange().counts().rows, rows) << "nobody has launched the graph";
  script.hot = 1;
  script.seed = 42;
  mine.upload(script);
  graph.launch(mine.stream());
  at.on->synchronize(mine.stream());
  EXPECT_EQ(mine.exchange().counts().rows, rows_received(script, mine.me()).size());
}

void a_choice_that_there_is_not_is_told_once(const rank_context& at) {
  const auto script = small_script(at, ep::layout::by_source);
  ep_rank mine(at, script.options);
  const ep::tokens from = mine.upload(script);
  auto ids = script.ids(mine.me());
  ids[0] = script.options.experts;
  mine.put(const_cast<std::int64_t*>(from.topk_ids), ids);
  const auto got = mine.exchange().dispatch(from, mine.plan(), mine.stream());
  (void)mine.get(got.rows, 1);
  const std::string number = std::to_string(script.options.experts);
  EXPECT_THAT(thrown_by([&] { mine.exchange().check(); }),
              HasSubstr("a token chose expert " + number + ": there are " + number));
  mine.exchange().combine(mine.plan(), mine.out(), nullptr, mine.stream());
  mine.run(script, false);
}

ep_script elastic_script(const rank_context& at) {
  auto script = script_for(at, {.experts = 2,
                                .top_k = 2,
                                .hidden = 4096,
                                .max_tokens = 512,
                                .device_rows = 256,
                                .adapt_steps = 3,
                                .sms = 4});
  script.seed = 43;
  script.hot = 1;
  return script;
}

void the_device_part_follows_the_load(const rank_context& at) {
  auto script = elastic_script(at);
  ep_rank mine(at, script.options);
  mine.run(script, false);
  const std::size_t before = mine.exchange().options().device_rows;
  const std::size_t most = rows_received(script, 0).size();  // the first rank has the hot expert
  const std::size_t grown = mine.exchange().adapt();
  EXPECT_GT(grown, before);
  EXPECT_GE(grown, std::min(mine.exchange().capacity(), most + most / 4));
  mine.run(script, false);
  EXPECT_EQ(mine.exchange().counts().spilled, 0u);
  // A light load gives memory back.
  for (std::size_t& tokens : script.counts) tokens = 10;
  EXPECT_EQ(mine.exchange().adapt(), grown) << "the same load leaves it where it is";
  mine.run(script, false);
  EXPECT_LT(mine.exchange().adapt(), grown);
  for (std::size_t& tokens : script.counts) tokens = 500;
  mine.run(script, true);
  EXPECT_THAT(thrown_by([&] { mine.exchange().adapt(0.5); }), HasSubstr("headroom of 0.5"));
}

void a_headroom_that_one_rank_gives_is_refused_on_all(const rank_context& at) {
  const auto script = elastic_script(at);
  ep_rank mine(at, script.options);
  mine.run(script, false);
  const std::size_t before = mine.exchange().options().device_rows;
  const int last = at.ranks->size() - 1;
  const bool odd = mine.me() == last;
  EXPECT_THAT(thrown_by_all(*at.ranks, [&] { mine.exchange().adapt(odd ? 0.5 : 1.25); }),
              HasSubstr("a headroom of 0.5"));
  if (last > 0) {
    EXPECT_THAT(thrown_by_all(*at.ranks, [&] { mine.exchange().adapt(odd ? 8 : 1.25); }),
                HasSubstr("headroom is 1.25 on rank 0 and 8 on rank " + std::to_string(last)));
  }
  EXPECT_EQ(mine.exchange().options().device_rows, before);
  EXPECT_GT(mine.exchange().adapt(), before) << "what was received counts still";
  mine.run(script, true);
}

void streams_may_go_when_adapt_has_waited_for_them(const rank_context& at) {
  const auto script = elastic_script(at);
  ep_rank mine(at, script.options);
  const ep::tokens from = mine.upload(script);
  const native_stream once = at.on->create_stream(at.device);
  mine.exchange().dispatch(from, mine.plan(), once);
  if (mine.across()) mine.across()->synchronize(once);
  mine.exchange().adapt();
  at.on->destroy_stream(once);
  mine.exchange().adapt();
  mine.run(script, false);
  if (at.ranks->node_count() > 1) return;
  // Nor is one known that was captured: who launches the graph tells where.
  const native_stream recorded = at.on->create_stream(at.device);
  {
    scoped_capture graph(*at.on, recorded);
    mine.exchange().dispatch(from, mine.plan(), recorded);
    graph.end();
    at.on->destroy_stream(recorded);
    graph.launch(mine.stream());
    const native_stream launched = mine.stream();
    mine.exchange().adapt(1.25, {.streams = {&launched, 1}});
  }
  mine.run(script, false);
}

}  // namespace

const std::vector<symmetric_case>& ep_call_cases() {
#define EVMM_CASE(name) \
  { #name, &(name) }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(plans_that_are_none_of_this_dispatch_are_refused),
      EVMM_CASE(sums_by_expert_are_those_of_the_last_dispatch),
      EVMM_CASE(counts_are_those_of_a_dispatch_that_ran),
      EVMM_CASE(a_choice_that_there_is_not_is_told_once),
      EVMM_CASE(the_device_part_follows_the_load),
      EVMM_CASE(a_headroom_that_one_rank_gives_is_refused_on_all),
      EVMM_CASE(streams_may_go_when_adapt_has_waited_for_them),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
