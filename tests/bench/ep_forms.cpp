// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ep_forms.hpp"

#include "tests/bench/ep_job.hpp"

#include <evmm/ep/low_latency.hpp>

#include <fmt/format.h>

#include <chrono>
#include <string>
#include <vector>

namespace evmm::bench {

namespace {

enum class part { dispatch, combine, combine_backward, dispatch_backward };

const char* to_string(part of) {
  switch (of) {
    case part::dispatch:
      return "dispatch";
    case part::combine:
      return "combine";
    case part::combine_backward:
      return "combine_backward";
    case part::dispatch_backward:
      return "dispatch_backward";
  }
  return "";
}

std::string form_of(const ep_case& wanted) {
  return fmt::format("{}{}{}", wanted.rows == ep::payload::fp8 ? "_fp8" : "_bf16",
                     wanted.quantize ? "_quantised" : "",
                     wanted.arranged == ep::layout::by_expert ? "_by_expert" : "");
}

ep::tokens tokens_of(const ep_job& mine) {
  return {.x = mine.x.local(),
          .scales = mine.fp8() && !mine.wanted.quantize ? mine.scales.local() : nullptr,
          .topk_ids = mine.ids.local(),
          .topk_weights = mine.weights.local(),
          .count = mine.wanted.tokens};
}

/// Rows that were quantised are not what was given: the tests hold them to their reference.
ep_rows rows_to_compare(const ep_job& mine, void* x, float* scales) {
  if (mine.wanted.quantize) return {};
  return {.x = x, .scales = scales};
}

void measure_low_latency(benchmark::State& state, const job& at, const ep_case& wanted, part what,
                         bool split) {
  ep_job mine(at, wanted, row_order::by_rank);
  ep::low_latency_exchange exchange(mine.heap, {.experts = mine.routing.experts(),
                                                .top_k = mine.routing.top_k(),
                                                .hidden = k_hidden,
                                                .rows = wanted.rows,
                                                .quantize = wanted.quantize,
                                                .arranged = wanted.arranged,
                                                .max_tokens = wanted.tokens,
                                                .sms = wanted.sms});
  const native_stream stream = mine.probe.stream();
  const bool by_expert = wanted.arranged == ep::layout::by_expert;
  const std::size_t all = static_cast<std::size_t>(at.ranks->size()) * wanted.tokens;
  std::vector<std::size_t> groups;
  for (int e = 0; e < mine.routing.local_experts(); ++e) {
    groups.push_back(static_cast<std::size_t>(e) * all);
  }
  const auto blocks =
      by_expert ? mine.blocks_by_expert(groups) : mine.blocks_by_source(wanted.tokens);
  ep::low_latency_exchange::round of;
  ep::low_latency_received got;
  const auto dispatch = [&] {
    if (split) {
      of = exchange.issue_dispatch(tokens_of(mine), stream);
      got = exchange.wait_dispatch(of, stream);
    } else {
      got = exchange.dispatch(tokens_of(mine), of, stream);
    }
  };
  const auto combine = [&] {
    if (split) {
      exchange.issue_combine(of, stream);
      exchange.wait_combine(of, mine.out.local(), nullptr, stream);
    } else {
      exchange.combine(of, mine.out.local(), nullptr, stream);
    }
  };
  std::size_t wrong = 0;
  for (int set = 0; set < 2; ++set) {
    dispatch();
    wrong += mine.wrong_rows(rows_to_compare(mine, got.x, got.scales), blocks);
    mine.fill_results(exchange.combine_buffer(of), blocks);
    combine();
    wrong += mine.wrong_sums();
  }
  if (at.refuse(state, wrong, "before the rounds")) return;
  const std::size_t bytes =
      what == part::dispatch ? mine.dispatched_bytes() : ep_job::combined_bytes();
  // A round is both; the other half is not timed.
  if (what == part::dispatch) {
    mine.measure(state, bytes, dispatch, combine);
  } else {
    dispatch();
    mine.measure(state, bytes, combine, dispatch);
    combine();
  }
  wrong = mine.wrong_sums();
  exchange.check();
  if (exchange.dead_ranks() != 0) ++wrong;
  if (at.refuse(state, wrong, "after the rounds")) return;
  state.counters["sms"] = wanted.sms;
  at.ranks->barrier("bench: done");
}

void measure_layout(benchmark::State& state, const job& at, const ep_case& wanted, part what) {
  ep_job mine(at, wanted, row_order::in_turn);
  ep::exchange exchange(mine.heap, {.experts = mine.routing.experts(),
                                    .top_k = mine.routing.top_k(),
                                    .hidden = k_hidden,
                                    .rows = wanted.rows,
                                    .quantize = wanted.quantize,
                                    .arranged = wanted.arranged,
                                    .expert_alignment = 128,
                                    .max_tokens = wanted.tokens,
                                    .sms = wanted.sms,
                                    .timeout = std::chrono::seconds(10)});
  ep::plan plan = exchange.make_plan();
  const native_stream stream = mine.probe.stream();
  const bool by_expert = wanted.arranged == ep::layout::by_expert;
  ep::received got;
  const auto dispatch = [&] { got = exchange.dispatch(tokens_of(mine), plan, stream); };
  const auto combine = [&] { exchange.combine(plan, mine.out.local(), nullptr, stream); };
  const auto blocks = [&] {
    if (!by_expert) return std::vector<ep_block>{{0, exchange.counts().rows, 0}};
    std::vector<std::size_t> begin{0};
    for (const std::size_t rows : exchange.counts().by_expert) {
      begin.push_back(begin.back() + (rows + 127) / 128 * 128);
    }
    return mine.blocks_by_expert(begin);
  };
  ep::tokens gradients = tokens_of(mine);
  gradients.scales = nullptr;
  const auto wrong_rows = [&] {
    return mine.wrong_rows(rows_to_compare(mine, got.x, got.scales), blocks());
  };
  dispatch();
  std::size_t wrong = wrong_rows();
  mine.fill_results(exchange.combine_buffer(), blocks());
  combine();
  wrong += mine.wrong_sums();
  if (at.refuse(state, wrong, "before the rounds")) return;
  switch (what) {
    case part::dispatch:
      mine.measure(state, mine.dispatched_bytes(), dispatch);
      wrong = wrong_rows();
      break;
    case part::combine:
      mine.probe.fill(mine.out.local(), mine.out.bytes(), 0);
      mine.measure(state, ep_job::combined_bytes(), combine);
      wrong = mine.wrong_sums();
      break;
    case part::combine_backward:
      mine.measure(state, ep_job::combined_bytes(),
                   [&] { exchange.combine_backward(gradients, plan, nullptr, stream); });
      break;
    case part::dispatch_backward:
      mine.measure(state, ep_job::combined_bytes(), [&] {
        exchange.dispatch_backward(plan, mine.out.local(), nullptr, nullptr, stream);
      });
      break;
  }
  exchange.check();
  if (at.refuse(state, wrong, "after the rounds")) return;
  state.counters["sms"] = wanted.sms;
  at.ranks->barrier("bench: done");
}

}  // namespace

void add_low_latency(const job& at) {
  for (const part what : {part::dispatch, part::combine}) {
    for (const ep::layout arranged : {ep::layout::by_source, ep::layout::by_expert}) {
      for (const bool split : {false, true}) {
        for (const std::size_t tokens : {1, 8, 32, 64, 128, 256, 512}) {
          for (const int sms : {8, 16, 24, 32, 48, 64}) {
            if (sms != 24 && (tokens != 128 || split)) continue;
            if (split && tokens != 128) continue;
            const ep_case wanted{
                .tokens = tokens, .rows = ep::payload::fp8, .sms = sms, .arranged = arranged};
            add_case(fmt::format("ep/low_latency_{}{}{}/tokens:{}/sms:{}", to_string(what),
                                 form_of(wanted), split ? "_split" : "", tokens, sms),
                     k_ep_rounds, [=](benchmark::State& state) {
                       measure_low_latency(state, at, wanted, what, split);
                     });
          }
        }
      }
    }
  }
}

void add_layouts(const job& at) {
  const auto add = [&](ep_case wanted, part what) {
    for (const std::size_t tokens : {128, 4096}) {
      wanted.tokens = tokens;
      add_case(fmt::format("ep/{}{}/tokens:{}/sms:{}", to_string(what), form_of(wanted), tokens,
                           wanted.sms),
               k_ep_rounds,
               [=](benchmark::State& state) { measure_layout(state, at, wanted, what); });
    }
  };
  add({.rows = ep::payload::fp8, .quantize = true}, part::dispatch);
  for (const ep::payload rows : {ep::payload::fp8, ep::payload::bf16}) {
    add({.rows = rows, .arranged = ep::layout::by_expert}, part::dispatch);
  }
  add({.arranged = ep::layout::by_expert}, part::combine);
  for (const ep::layout arranged : {ep::layout::by_source, ep::layout::by_expert}) {
    add({.arranged = arranged}, part::combine_backward);
    add({.arranged = arranged}, part::dispatch_backward);
  }
}

}  // namespace evmm::bench
