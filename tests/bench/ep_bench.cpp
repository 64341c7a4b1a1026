// SPDX-License-Identifier: Apache-2.0
// Expert-parallel dispatch and combine: from the user's rows to rows that the user's next kernel
// can read, beside NCCL's send and receive with the permutation that they need. Run under mpirun,
// one rank a GPU; rank 0 reports the slowest rank of each round.
#include "lib/support/environment.hpp"
#include "tests/bench/ep_forms.hpp"
#include "tests/bench/ep_job.hpp"
#include "tests/bench/ep_nccl.hpp"
#include "tests/bench/ep_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <string>
#include <vector>

namespace evmm::bench {
namespace {

enum class step { dispatch, dispatch_again, combine };

std::size_t bytes_of(step what, const ep_job& mine) {
  return what == step::combine ? ep_job::combined_bytes() : mine.dispatched_bytes();
}

std::size_t wrong_counts(const ep::row_counts& counts, const ep_routing& routing, int rank,
                         std::size_t device_rows) {
  const std::size_t rows = routing.received(rank);
  std::size_t wrong = counts.rows != rows;
  wrong += counts.spilled != rows - std::min(rows, device_rows);
  for (int r = 0; r < routing.ranks(); ++r) {
    wrong += counts.by_source[static_cast<std::size_t>(r)] != routing.rows(r, rank);
  }
  return wrong;
}

/// What lies where, of all ranks.
void report_memory(benchmark::State& state, const ep_job& mine, std::size_t device_rows,
                   std::size_t host_bytes, std::size_t bytes_a_row) {
  const std::size_t spilled = mine.routing.spilled(device_rows);
  state.counters["device_rows"] = static_cast<double>(device_rows);
  state.counters["spilled_rows"] = static_cast<double>(spilled);
  state.counters["spilled_MB"] = static_cast<double>(spilled * bytes_a_row) * 1e-6;
  state.counters["spilled"] =
      static_cast<double>(spilled) / static_cast<double>(mine.routing.received_in_all());
  state.counters["hbm_saved_MiB"] = static_cast<double>(host_bytes) / (1 << 20);
}

void measure_exchange(benchmark::State& state, const job& at, const ep_case& wanted, step what) {
  ep_job mine(at, wanted, row_order::in_turn);
  const ep_routing& routing = mine.routing;
  const auto rank = static_cast<std::size_t>(at.ranks->rank().value);
  const std::size_t before = mine.heap.report().ranks[rank].host_bytes;
  ep::exchange exchange(mine.heap, {.experts = routing.experts(),
                                    .top_k = routing.top_k(),
                                    .hidden = k_hidden,
                                    .rows = wanted.rows,
                                    .max_tokens = wanted.tokens,
                                    .device_rows = mine.device_rows(),
                                    .sms = wanted.sms,
                                    .timeout = std::chrono::seconds(10)});
  // The part of the worst case for which there is no DEVICE memory.
  const std::size_t host_bytes = mine.heap.report().ranks[rank].host_bytes - before;
  ep::plan plan = exchange.make_plan();
  const native_stream stream = mine.probe.stream();
  const ep::tokens tokens{.x = mine.x.local(),
                          .scales = mine.fp8() ? mine.scales.local() : nullptr,
                          .topk_ids = mine.ids.local(),
                          .topk_weights = mine.weights.local(),
                          .count = wanted.tokens};
  const auto wrong_rows = [&](const ep::received& got) {
    return mine.wrong_rows({.x = got.x,
                            .scales = got.scales,
                            .tokens = got.tokens,
                            .experts = got.experts,
                            .weights = got.weights}) +
           wrong_counts(exchange.counts(), routing, static_cast<int>(rank),
                        exchange.options().device_rows);
  };
  const auto combine = [&] { exchange.combine(plan, mine.out.local(), nullptr, stream); };

  // Compared before anything is measured, and again with what the last round left behind.
  const ep::received got = exchange.dispatch(tokens, plan, stream);
  std::size_t wrong = wrong_rows(got);
  mine.fill_results(exchange.combine_buffer());
  combine();
  wrong += mine.wrong_sums();
  if (at.refuse(state, wrong, "before the rounds")) return;

  // What is there is spoilt, so that the last round must have written what is compared.
  const std::size_t bytes = bytes_of(what, mine);
  if (what == step::combine) {
    mine.probe.fill(mine.out.local(), mine.out.bytes(), 0);
    mine.measure(state, bytes, combine);
    wrong = mine.wrong_sums();
  } else {
    mine.probe.fill(got.x, routing.received(static_cast<int>(rank)) * mine.row_bytes(), 0);
    mine.measure(state, bytes, [&] {
      if (what == step::dispatch) {
        exchange.dispatch(tokens, plan, stream);
      } else {
        exchange.dispatch_again(tokens, plan, stream);
      }
    });
    wrong = wrong_rows(got);
  }
  exchange.check();
  if (at.refuse(state, wrong, "after the rounds")) return;
  state.counters["sms"] = wanted.sms;
  report_memory(state, mine, exchange.options().device_rows, host_bytes, bytes);
  at.ranks->barrier("bench: done");
}

void measure_nccl(benchmark::State& state, const job& at, const ep_case& wanted, step what) {
  ep_job mine(at, wanted, row_order::by_rank);
  nccl_exchange nccl(at, mine);
  const native_stream stream = mine.probe.stream();
  const std::size_t received = mine.routing.received(at.ranks->rank().value);
  const auto combine = [&] { nccl.combine(stream); };

  nccl.dispatch(stream);
  std::size_t wrong = mine.wrong_rows(nccl.received());
  mine.fill_results(nccl.results());
  combine();
  wrong += mine.wrong_sums();
  if (at.refuse(state, wrong, "before the rounds")) return;

  const std::size_t bytes = bytes_of(what, mine);
  if (what == step::combine) {
    mine.probe.fill(mine.out.local(), mine.out.bytes(), 0);
    mine.measure(state, bytes, combine);
    wrong = mine.wrong_sums();
  } else {
    mine.probe.fill(nccl.received_rows(), received * mine.row_bytes(), 0);
    mine.measure(state, bytes, [&] { nccl.dispatch(stream); });
    wrong = mine.wrong_rows(nccl.received());
  }
  if (at.refuse(state, wrong, "after the rounds")) return;
  // NCCL does not tell how many it takes; this is what it was held to.
  if (const auto most = environment_integer("NCCL_MAX_CTAS", 1, 1024)) {
    state.counters["sms"] = static_cast<double>(*most);
  }
  report_memory(state, mine, mine.routing.received_at_most(), 0, bytes);
  state.SetLabel(nccl.version());
  at.ranks->barrier("bench: done");
}

/// "/tokens:4096/sms:24/routing:zipf_1.0/placement:in_order/spill:10"; what is as ever is left out.
std::string name_of(const std::string& what, const ep_case& wanted, bool nccl) {
  std::string name = fmt::format("ep/{}/tokens:{}", what, wanted.tokens);
  if (!nccl) name += fmt::format("/sms:{}", wanted.sms);
  if (wanted.routing.name() != "uniform") {
    name += fmt::format("/routing:{}/placement:{}", wanted.routing.name(),
                        to_string(wanted.routing.where));
  }
  if (wanted.sized == device_part::spill) name += fmt::format("/spill:{:.0f}", wanted.spill * 100);
  if (wanted.sized == device_part::average) name += "/sized:average";
  return name;
}

struct kind {
  const char* name;
  ep::payload rows;
  step of;
};
constexpr kind k_kinds[] = {{"dispatch_fp8", ep::payload::fp8, step::dispatch},
                            {"dispatch_bf16", ep::payload::bf16, step::dispatch},
                            {"combine", ep::payload::bf16, step::combine}};
constexpr kind k_again = {"dispatch_fp8_again", ep::payload::fp8, step::dispatch_again};

void add_exchange(const job& at, const kind& what, ep_case wanted) {
  wanted.rows = what.rows;
  add_case(name_of(what.name, wanted, false), k_ep_rounds,
           [=](benchmark::State& state) { measure_exchange(state, at, wanted, what.of); });
}

void add_nccl(const job& at, const kind& what, ep_case wanted) {
  wanted.rows = what.rows;
  add_case(name_of(fmt::format("nccl_{}", what.name), wanted, true), k_ep_rounds,
           [=](benchmark::State& state) { measure_nccl(state, at, wanted, what.of); });
}

/// By tokens, from decode to prefill, and by multiprocessors.
void add_sizes(const job& at) {
  std::vector<ep_case> cases, peers;
  for (const std::size_t tokens : {1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 4096, 8192}) {
    for (const int sms : {8, 16, 24, 32, 48, 64}) {
      if (sms == 24 || tokens == 128 || tokens >= 4096) {
        cases.push_back({.tokens = tokens, .sms = sms});
      }
    }
    peers.push_back({.tokens = tokens});
  }
  for (const kind& what : k_kinds) {
    for (const ep_case& wanted : cases) add_exchange(at, what, wanted);
    for (const ep_case& wanted : peers) add_nccl(at, what, wanted);
  }
  for (const ep_case& wanted : cases) add_exchange(at, k_again, wanted);
}

/// By the part of the rows that lies in host memory; 0 has a host part that nothing reaches.
void add_spill(const job& at) {
  for (const kind& what : k_kinds) {
    for (const double spill : {0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5}) {
      add_exchange(at, what, {.sized = device_part::spill, .spill = spill});
    }
  }
}

/// By how unequally experts are chosen, with room for everything on the device, and for the average
/// alone.
void add_skew(const job& at) {
  std::vector<routing_choice> choices;
  for (const placement where : {placement::in_order, placement::balanced}) {
    for (const double skew : {0.5, 1.0, 1.5}) choices.push_back({.skew = skew, .where = where});
  }
  const auto files = recorded_routings();
  for (const std::string& file : files) {
    for (const placement where :
         {placement::in_order, placement::round_robin, placement::balanced}) {
      choices.push_back({.file = file, .where = where});
    }
  }
  for (const kind& what : k_kinds) {
    add_exchange(at, what, {.sized = device_part::average});
    for (const routing_choice& choice : choices) {
      add_exchange(at, what, {.routing = choice});
      add_exchange(at, what, {.routing = choice, .sized = device_part::average});
      add_nccl(at, what, {.routing = choice});
    }
  }
  if (!files.empty()) return;
  add_case("ep/routing:recorded", 1, [](benchmark::State& state) {
    state.SkipWithError("no recorded routing: EVMM_ROUTING names a file, or a folder of *.csv.gz");
  });
}

void add_cases(const job& at) {
  add_sizes(at);
  add_low_latency(at);
  add_layouts(at);
  add_spill(at);
  add_skew(at);
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  evmm::bench::ep_table table;
  return evmm::bench::run_job(argc, argv, evmm::bench::add_cases, &table);
}
