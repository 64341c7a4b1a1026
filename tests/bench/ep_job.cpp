// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ep_job.hpp"

#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <memory>
#include <tuple>
#include <vector>

namespace evmm::bench {

namespace {

using namespace evmm::units;

constexpr int k_experts = 256;
constexpr int k_top_k = 8;

/// Made once for all cases that go by it.
const ep_routing& routing_of(const routing_choice& choice, int ranks, std::size_t tokens) {
  using key = std::tuple<std::string, placement, std::size_t>;
  static auto* const made = new std::map<key, std::unique_ptr<ep_routing>>;
  auto& routing = (*made)[{choice.file + choice.name(), choice.where, tokens}];
  if (!routing) {
    const moe::routing chosen =
        choice.file.empty()
            ? moe::generate_routing({.experts = k_experts,
                                     .top_k = k_top_k,
                                     .tokens = static_cast<std::size_t>(ranks) * tokens,
                                     .skew = choice.skew})
            : moe::read_routing(choice.file);
    routing = std::make_unique<ep_routing>(chosen, ranks, tokens, choice.where);
  }
  return *routing;
}

symmetric_region make_region(const job& at, const ep_case& wanted) {
  if (at.on->info().kind != driver_kind::cuda) {
    throw unsupported("the steps are measured as kernels, and there is no GPU",
                      "run it where there is one, a rank a GPU");
  }
  const auto rows = static_cast<std::size_t>(at.ranks->size()) * wanted.tokens;
  // By expert there is a second copy, of a row for each choice.
  const std::size_t a_row = k_hidden * (wanted.arranged == ep::layout::by_expert ? 40 : 6);
  return {at.ranks, at.on, {.device = at.device, .reserve = 8_GiB + rows * a_row}};
}

}  // namespace

std::string routing_choice::name() const {
  if (file.empty()) return skew == 0 ? "uniform" : fmt::format("zipf_{:.1f}", skew);
  const std::string last = std::filesystem::path(file).filename();
  return last.substr(0, last.find('.'));
}

ep_job::ep_job(const job& at, const ep_case& of, row_order order)
    : wanted(of),
      routing(routing_of(of.routing, at.ranks->size(), of.tokens)),
      heap(make_region(at, of), {}),
      flags(heap, symmetric_view::max_ranks),
      x(heap, of.tokens * k_hidden * 2),
      scales(heap, of.tokens * k_hidden / 128),
      ids(heap, routing.ids(0).size()),
      weights(heap, ids.size()),
      out(heap, of.tokens * k_hidden),
      probe(at.device, heap.region().view(), flags.offset()),
      at_(at),
      rank_(at.ranks->rank().value),
      masks_(heap, of.tokens),
      sources_(heap, routing.received_at_most() * (by_expert() ? k_top_k : 1)),
      tokens_(heap, sources_.size()),
      experts_(heap, routing.received_at_most() * static_cast<std::size_t>(routing.top_k())),
      row_weights_(heap, experts_.size()) {
  const auto upload = [&](const auto& to, const auto& from) {
    if (from.empty()) return;
    at.on->copy(reinterpret_cast<address>(to.local()), reinterpret_cast<address>(from.data()),
                from.size() * sizeof(from[0]), probe.stream());
    at.on->synchronize(probe.stream());
  };
  std::vector<std::int32_t> sources, tokens, experts;
  std::vector<float> row_weights;
  const std::int64_t first = std::int64_t{rank_} * routing.local_experts();
  for (int turn = 0; turn < routing.ranks(); ++turn) {
    const int source = order == row_order::by_rank ? turn : (rank_ + turn) % routing.ranks();
    const auto chosen = routing.ids(source);
    const auto weight = routing.weights(source);
    const auto top_k = static_cast<std::size_t>(routing.top_k());
    for (std::size_t t = 0; t < of.tokens; ++t) {
      if (!routing.goes(source, t, rank_)) continue;
      sources.push_back(source);
      tokens.push_back(static_cast<std::int32_t>(t));
      for (std::size_t k = t * top_k; k < (t + 1) * top_k; ++k) {
        const std::int64_t local = chosen[k] - first;
        const bool here = local >= 0 && local < routing.local_experts();
        experts.push_back(here ? static_cast<std::int32_t>(local) : -1);
        row_weights.push_back(here ? weight[k] : 0);
      }
    }
  }
  std::vector<float> own_weights(routing.weights(rank_).begin(), routing.weights(rank_).end());
  if (by_expert()) {
    // One row for each choice, sorted by expert: what is expected is that, without the rest.
    const std::vector<std::int32_t> of_rows = experts, row_sources = sources, row_tokens = tokens;
    const auto top_k = static_cast<std::size_t>(routing.top_k());
    sources.clear();
    tokens.clear();
    for (int e = 0; e < routing.local_experts(); ++e) {
      const std::size_t before = sources.size();
      for (std::size_t at_row = 0; at_row < of_rows.size(); ++at_row) {
        if (of_rows[at_row] != e) continue;
        sources.push_back(row_sources[at_row / top_k]);
        tokens.push_back(row_tokens[at_row / top_k]);
      }
      expert_rows_.push_back(sources.size() - before);
    }
    // A rank's first choice counts alone, so that sums are those of a row for each rank.
    const auto chosen = routing.ids(rank_);
    for (std::size_t t = 0; t < of.tokens; ++t) {
      std::uint64_t seen = 0;
      for (std::size_t k = t * top_k; k < (t + 1) * top_k; ++k) {
        if (chosen[k] < 0) continue;
        const std::uint64_t bit = std::uint64_t{1} << (chosen[k] / routing.local_experts());
        own_weights[k] = (seen & bit) == 0 ? 1.0f : 0.0f;
        seen |= bit;
      }
    }
  }
  upload(ids, routing.ids(rank_));
  upload(weights, own_weights);
  upload(masks_, routing.masks(rank_));
  upload(sources_, sources);
  upload(tokens_, tokens);
  upload(experts_, experts);
  upload(row_weights_, row_weights);
  at.on->fill(reinterpret_cast<address>(flags.local()), std::byte{0}, flags.bytes(),
              probe.stream());
  const auto seed = static_cast<std::uint64_t>(rank_);
  probe.fill(x.local(), x.bytes(), seed);
  probe.fill(scales.local(), scales.bytes(), ~seed);
  at.on->synchronize(probe.stream());
  at.ranks->barrier("bench: tensors");
}

std::size_t ep_job::device_rows() const {
  switch (wanted.sized) {
    case device_part::spill:
      return std::max<std::size_t>(routing.device_rows_for(wanted.spill), 1);
    case device_part::average:
      return std::max<std::size_t>(
          routing.received_in_all() / static_cast<std::size_t>(routing.ranks()), 1);
    case device_part::all:
      break;
  }
  return 0;
}

ep_expected ep_job::expected() const {
  return {.rows = routing.received(rank_),
          .sources = sources_.local(),
          .tokens = tokens_.local(),
          .experts = experts_.local(),
          .weights = row_weights_.local(),
          .x = x.offset(),
          .scales = scales.offset(),
          .row_words = row_bytes() / sizeof(std::uint64_t),
          .scale_count = static_cast<int>(scale_count()),
          .top_k = routing.top_k()};
}

std::size_t ep_job::wrong_rows(const ep_rows& got) {
  return probe.wrong_rows(got, expected());
}

void ep_job::fill_results(void* y) {
  probe.fill_results(y, expected(), k_hidden);
}

ep_expected ep_job::expected(const ep_block& block) const {
  ep_expected part = expected();
  const auto top_k = static_cast<std::size_t>(routing.top_k());
  part.rows = block.rows;
  part.sources += block.first;
  part.tokens += block.first;
  part.experts += block.first * top_k;
  part.weights += block.first * top_k;
  return part;
}

std::vector<ep_block> ep_job::blocks_by_source(std::size_t stride) const {
  std::vector<ep_block> blocks;
  std::size_t first = 0;
  for (int s = 0; s < routing.ranks(); ++s) {
    const std::size_t rows = routing.rows(s, rank_);
    blocks.push_back({first, rows, static_cast<std::size_t>(s) * stride});
    first += rows;
  }
  return blocks;
}

std::vector<ep_block> ep_job::blocks_by_expert(const std::vector<std::size_t>& begin) const {
  std::vector<ep_block> blocks;
  std::size_t first = 0;
  for (std::size_t e = 0; e < expert_rows_.size(); ++e) {
    blocks.push_back({first, expert_rows_[e], begin[e]});
    first += expert_rows_[e];
  }
  return blocks;
}

std::size_t ep_job::wrong_rows(const ep_rows& got, const std::vector<ep_block>& blocks) {
  std::size_t wrong = 0;
  const auto from = [](auto* at, std::size_t elements) {
    return at == nullptr ? at : at + elements;
  };
  for (const ep_block& block : blocks) {
    const std::size_t choices = block.at * static_cast<std::size_t>(routing.top_k());
    wrong += probe.wrong_rows({.x = from(static_cast<const char*>(got.x), block.at * row_bytes()),
                               .scales = from(got.scales, block.at * scale_count()),
                               .tokens = from(got.tokens, block.at),
                               .experts = from(got.experts, choices),
                               .weights = from(got.weights, choices)},
                              expected(block));
  }
  return wrong;
}

void ep_job::fill_results(void* y, const std::vector<ep_block>& blocks) {
  for (const ep_block& block : blocks) {
    probe.fill_results(static_cast<char*>(y) + block.at * combined_bytes(), expected(block),
                       k_hidden);
  }
}

std::size_t ep_job::wrong_sums() {
  return probe.wrong_sums(out.local(), masks_.local(), wanted.tokens, k_hidden);
}

void ep_job::measure(benchmark::State& state, std::size_t bytes_a_row,
                     const std::function<void()>& step, const std::function<void()>& then) {
  std::vector<double> times;
  for (auto _ : state) {
    probe.prepare();
    probe.begin();
    step();
    times.push_back(at_.slowest(probe.end()));
    if (then) then();
    state.SetIterationTime(times.back());
  }
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());

  std::size_t away = 0;     // rows that leave their GPU
  std::size_t busiest = 0;  // that enter or leave one GPU
  for (int r = 0; r < routing.ranks(); ++r) {
    const std::size_t own = routing.rows(r, r);
    away += routing.sent(r) - own;
    busiest = std::max({busiest, routing.sent(r) - own, routing.received(r) - own});
  }
  const auto rate = [&](std::size_t rows, int of_ranks) {
    return static_cast<double>(rows * bytes_a_row) / of_ranks / *middle * 1e-9;
  };
  state.counters["median_us"] = *middle * 1e6;
  state.counters["logical_GBps"] = rate(routing.received_in_all(), routing.ranks());
  state.counters["physical_GBps"] = rate(away, routing.ranks());
  state.counters["busiest_GBps"] = rate(busiest, 1);
}

}  // namespace evmm::bench
