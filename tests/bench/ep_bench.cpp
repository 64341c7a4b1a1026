// SPDX-License-Identifier: Apache-2.0
// Expert-parallel dispatch and combine: from the user's rows to rows that the user's next kernel
// can read. Run under mpirun, one rank a GPU; rank 0 reports the slowest rank of each round.
#include "tests/bench/bench_support.hpp"
#include "tests/bench/ep_kernels.hpp"
#include "tests/bench/job_support.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/units.hpp>

#include <algorithm>
#include <bit>
#include <random>
#include <string>
#include <vector>

namespace evmm::bench {
namespace {

using namespace evmm::units;

constexpr int k_rounds = 30;
constexpr int k_experts = 256;
constexpr int k_top_k = 8;
constexpr std::size_t k_hidden = 7168;

struct ep_case {
  std::size_t tokens = 4096;
  ep::payload rows = ep::payload::bf16;
  int sms = 24;
  double spilled = 0;  ///< of the rows that come, the part beyond device_rows
};

/// One rank's tensors and its exchange.
struct ep_job {
  ep_job(const job& at, const ep_case& wanted)
      : heap(symmetric_region(
                 at.ranks, at.on,
                 {.device = at.device, .reserve = 8_GiB + wanted.tokens * 8 * k_hidden * 6}),
             {}),
        flags(heap, symmetric_view::max_ranks),
        x(heap, wanted.tokens * k_hidden * 2),
        scales(heap, wanted.tokens * k_hidden / 128),
        ids(heap, wanted.tokens * k_top_k),
        weights(heap, wanted.tokens * k_top_k),
        out(heap, wanted.tokens * k_hidden) {
    const native_stream stream = at.on->create_stream(at.device);
    at.on->fill(reinterpret_cast<address>(flags.local()), std::byte{0}, flags.bytes(), stream);
    at.on->fill(reinterpret_cast<address>(scales.local()), std::byte{0}, scales.bytes(), stream);
    std::mt19937_64 next(static_cast<std::uint64_t>(at.ranks->rank().value) + 1);
    std::vector<std::int64_t> chosen(ids.size());
    for (std::size_t t = 0; t < wanted.tokens; ++t) {
      for (std::size_t k = 0; k < k_top_k; ++k) {  // distinct experts, all alike
        std::int64_t& id = chosen[t * k_top_k + k];
        do {
          id = static_cast<std::int64_t>(next() % k_experts);
        } while (std::find(&chosen[t * k_top_k], &id, id) != &id);
      }
    }
    const std::vector<float> ones(weights.size(), 0.125f);
    at.on->copy(reinterpret_cast<address>(ids.local()), reinterpret_cast<address>(chosen.data()),
                ids.bytes(), stream);
    at.on->copy(reinterpret_cast<address>(weights.local()), reinterpret_cast<address>(ones.data()),
                weights.bytes(), stream);
    at.on->synchronize(stream);
    at.on->destroy_stream(stream);
    const int local = k_experts / at.ranks->size();
    for (std::size_t t = 0; t < wanted.tokens; ++t) {
      std::uint64_t mask = 0;
      for (std::size_t k = 0; k < k_top_k; ++k) {
        mask |= std::uint64_t{1} << (chosen[t * k_top_k + k] / local);
      }
      rows_sent += static_cast<std::size_t>(std::popcount(mask));
      rows_away += static_cast<std::size_t>(
          std::popcount(mask & ~(std::uint64_t{1} << at.ranks->rank().value)));
    }
    at.ranks->barrier("bench: tensors");
  }

  symmetric_heap heap;
  symmetric_buffer<std::uint64_t> flags;
  symmetric_buffer<std::byte> x;
  symmetric_buffer<float> scales;
  symmetric_buffer<std::int64_t> ids;
  symmetric_buffer<float> weights;
  symmetric_buffer<std::uint16_t> out;
  std::size_t rows_sent = 0;  ///< a row for each rank that a token goes to
  std::size_t rows_away = 0;  ///< those that leave the GPU
};

enum class step { dispatch, dispatch_again, combine };

void measure(benchmark::State& state, const job& at, const ep_case& wanted, step what) {
  ep_job mine(at, wanted);
  const std::size_t expected = mine.rows_sent;  // as many come as go, nearly
  ep::exchange exchange(
      mine.heap, {.experts = k_experts,
                  .top_k = k_top_k,
                  .hidden = k_hidden,
                  .rows = wanted.rows,
                  .max_tokens = wanted.tokens,
                  .device_rows = wanted.spilled == 0
                                     ? 0
                                     : static_cast<std::size_t>(static_cast<double>(wanted.tokens) *
                                                                3.6 * (1 - wanted.spilled)),
                  .sms = wanted.sms,
                  .timeout = std::chrono::seconds(10)});
  ep::plan plan = exchange.make_plan();
  ep_probe probe(at.device, mine.heap.region().view(), mine.flags.offset());
  const std::size_t row_bytes = k_hidden * (wanted.rows == ep::payload::bf16 ? 2 : 1);
  probe.fill(mine.x.local(), mine.x.bytes(), static_cast<std::uint64_t>(at.ranks->rank().value));
  probe.prepare();
  const ep::tokens tokens{.x = mine.x.local(),
                          .scales = wanted.rows == ep::payload::fp8 ? mine.scales.local() : nullptr,
                          .topk_ids = mine.ids.local(),
                          .topk_weights = mine.weights.local(),
                          .count = wanted.tokens};
  ep::received got = exchange.dispatch(tokens, plan, probe.stream());
  const std::size_t spilled = exchange.counts().spilled;
  std::size_t wrong = probe.wrong_rows(got, mine.x.offset(), row_bytes);
  // Every row that comes back is made of ones.
  probe.fill_ones(exchange.combine_buffer(), exchange.counts().rows * k_hidden);
  exchange.combine(plan, mine.out.local(), nullptr, probe.stream());
  wrong += probe.wrong_sums(mine.out.local(), mine.ids.local(), wanted.tokens, k_top_k,
                            k_experts / at.ranks->size(), k_hidden);
  if (at.slowest(static_cast<double>(wrong)) != 0) {
    state.SkipWithError("what arrived is wrong");
    return;
  }
  std::vector<double> times;
  for (auto _ : state) {
    probe.prepare();
    probe.begin();
    switch (what) {
      case step::dispatch:
        exchange.dispatch(tokens, plan, probe.stream());
        break;
      case step::dispatch_again:
        exchange.dispatch_again(tokens, plan, probe.stream());
        break;
      case step::combine:
        exchange.combine(plan, mine.out.local(), nullptr, probe.stream());
        break;
    }
    times.push_back(at.slowest(probe.end()));
    state.SetIterationTime(times.back());
  }
  exchange.check();
  std::nth_element(times.begin(), times.begin() + k_rounds / 2, times.end());
  const double median = times[k_rounds / 2];
  const std::size_t bytes = what == step::combine ? k_hidden * 2 : row_bytes;
  state.counters["median_us"] = median * 1e6;
  state.counters["logical_GBps"] = static_cast<double>(mine.rows_sent * bytes) / median * 1e-9;
  state.counters["physical_GBps"] = static_cast<double>(mine.rows_away * bytes) / median * 1e-9;
  state.counters["spilled"] = static_cast<double>(spilled) / static_cast<double>(expected);
  at.ranks->barrier("bench: done");
}

void add_cases(const job& at) {
  const auto add = [&](const std::string& name, const ep_case& wanted, step what) {
    add_case(
        "ep/" + name + "/tokens:" + std::to_string(wanted.tokens) +
            "/sms:" + std::to_string(wanted.sms) +
            (wanted.spilled > 0 ? "/spill:" + std::to_string(static_cast<int>(wanted.spilled * 100))
                                : ""),
        k_rounds, [=](benchmark::State& state) { measure(state, at, wanted, what); });
  };
  for (const std::size_t tokens : {128, 512, 4096, 8192}) {
    for (const int sms : {16, 24, 32, 64}) {
      add("dispatch_fp8", {tokens, ep::payload::fp8, sms}, step::dispatch);
      add("dispatch_fp8_again", {tokens, ep::payload::fp8, sms}, step::dispatch_again);
      add("dispatch_bf16", {tokens, ep::payload::bf16, sms}, step::dispatch);
      add("combine", {tokens, ep::payload::bf16, sms}, step::combine);
    }
  }
  for (const double spilled : {0.1, 0.25, 0.5}) {
    add("dispatch_bf16", {4096, ep::payload::bf16, 24, spilled}, step::dispatch);
    add("combine", {4096, ep::payload::bf16, 24, spilled}, step::combine);
  }
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run_job(argc, argv, evmm::bench::add_cases);
}
