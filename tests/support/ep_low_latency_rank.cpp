// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_low_latency_rank.hpp"

#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <algorithm>

namespace evmm::test {

using namespace evmm::units;

low_latency_rank::low_latency_rank(const rank_context& at, const ep::exchange_options& options,
                                   std::chrono::milliseconds timeout, const channel_options& across)
    : ep_tensors(at, options, 2_GiB, 16_MiB), exchange_(make_exchange(options, timeout, across)) {
  for (auto& out : out_) out = {heap_, options.max_tokens * options.hidden};
  saved_x_ = {heap_, x_.size()};
  saved_scales_ = {heap_, scales_.size()};
  saved_ids_ = {heap_, ids_.size()};
  saved_weights_ = {heap_, weights_.size()};
}

low_latency_rank::~low_latency_rank() {
  // Others may still wait for what this rank sent last.
  if (across_) {
    EXPECT_NO_THROW(across_->close());
  }
  at_.on->synchronize(stream_);
}

ep::low_latency_exchange& low_latency_rank::make_exchange(const ep::exchange_options& options,
                                                          std::chrono::milliseconds timeout,
                                                          const channel_options& across) {
  const ep::low_latency_options same{.experts = options.experts,
                                     .top_k = options.top_k,
                                     .hidden = options.hidden,
                                     .rows = options.rows,
                                     .quantize = options.quantize,
                                     .arranged = options.arranged,
                                     .max_tokens = options.max_tokens,
                                     .sms = options.sms,
                                     .timeout = timeout};
  if (at_.ranks->node_count() == 1) return made_.emplace(heap_, same);
  across_.emplace(heap_.region(), across);
  return made_.emplace(heap_, *across_, same);
}

void low_latency_rank::move_tokens(bool away) {
  const auto move = [&](const auto& used, const auto& saved) {
    const auto &to = away ? saved : used, &from = away ? used : saved;
    at_.on->copy(reinterpret_cast<address>(to.local()), reinterpret_cast<address>(from.local()),
                 from.bytes(), stream_);
  };
  move(x_, saved_x_);
  move(scales_, saved_scales_);
  move(ids_, saved_ids_);
  move(weights_, saved_weights_);
}

std::size_t low_latency_rank::batch(const ep_script& script) const {
  return script.options.max_tokens * static_cast<std::size_t>(at_.ranks->node_count());
}

std::size_t low_latency_rank::all_places(const ep_script& script) const {
  return batch(script) * at_.ranks->node_ranks().size();
}

std::size_t low_latency_rank::token_of(const ep_script& script, const ep_row& row) const {
  const int node = script.node_of[static_cast<std::size_t>(row.source)];
  return static_cast<std::size_t>(node) * script.options.max_tokens + row.token;
}

std::vector<low_latency_rank::placed> low_latency_rank::places(const ep_script& script,
                                                               std::uint64_t without) const {
  const auto rows = rows_received(script, me());
  const auto mates = script.ranks_of(script.node_of[static_cast<std::size_t>(me())]);
  std::vector<placed> all;
  for (std::size_t source = 0; source < mates.size(); ++source) {
    std::vector<std::size_t> via;
    for (std::size_t row = 0; row < rows.size(); ++row) {
      const bool lost = ((without >> rows[row].via | without >> rows[row].source) & 1) != 0;
      if (rows[row].via == mates[source] && !lost) via.push_back(row);
    }
    std::sort(via.begin(), via.end(), [&](std::size_t a, std::size_t b) {
      return token_of(script, rows[a]) < token_of(script, rows[b]);
    });
    for (std::size_t i = 0; i < via.size(); ++i)
      all.push_back({via[i], source * batch(script) + i});
  }
  return all;
}

void low_latency_rank::expect_received(const ep_script& script, const ep::low_latency_received& got,
                                       std::uint64_t without) {
  const auto rows = rows_received(script, me());
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  const int local = script.options.experts / script.ranks;
  const std::size_t all = all_places(script);
  std::vector<std::int32_t> source_rows(at_.ranks->node_ranks().size());
  const auto experts = get(got.experts, all * top_k);
  const auto weights = get(got.weights, all * top_k);
  const auto tokens = get(got.tokens, all);
  const std::size_t x_rows = script.by_expert() ? all * static_cast<std::size_t>(local) : all;
  const auto x = get(static_cast<const std::byte*>(got.x), x_rows * script.row_bytes());
  const auto scales = get(got.scales, script.scaled() ? x_rows * script.scale_count() : 0);
  const ep_sent sent(script);
  std::vector<std::int32_t> group(static_cast<std::size_t>(local));
  std::vector<std::int32_t> expert_rows, row_places;
  if (script.by_expert()) {
    expert_rows = get(got.expert_rows, all * top_k);
    row_places = get(got.row_places, x_rows);
  }
  std::size_t wrong = 0;
  for (const auto [row, at] : places(script, without)) {
    const std::size_t source = at / batch(script);
    ++source_rows[source];
    const std::size_t t = rows[row].token;
    const auto ids = script.ids(rows[row].source);
    const auto given = script.weights(rows[row].source);
    wrong += tokens[at] != static_cast<std::int32_t>(token_of(script, rows[row]));
    if (!script.by_expert()) wrong += !sent.is_row(rows[row], x, scales, at);
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::int64_t id = ids[t * top_k + k];
      const bool here = id >= 0 && id / local == me();
      const std::size_t choice = at * top_k + k;
      wrong += experts[choice] != (here ? id % local : -1);
      wrong += weights[choice] != (here ? given[t * top_k + k] : 0);
      if (!here || !script.by_expert()) continue;
      const auto expert = static_cast<std::size_t>(id % local);
      const std::size_t place = expert * all + static_cast<std::size_t>(group[expert]++);
      wrong += expert_rows[choice] != static_cast<std::int32_t>(place);
      wrong += row_places[place] != static_cast<std::int32_t>(at);
      wrong += !sent.is_row(rows[row], x, scales, place);
    }
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(get(got.source_rows, source_rows.size()), source_rows);
  if (script.by_expert()) {
    EXPECT_EQ(get(got.expert_tokens, group.size()), group);
  }
}

void low_latency_rank::write_outputs(const ep_script& script, const round& of,
                                     const ep::low_latency_received& got, std::uint64_t without) {
  const std::size_t hidden = script.options.hidden;
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  const std::size_t all = all_places(script);
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
  for (const auto [row, at] : places(script, without)) {
    if (!script.by_expert()) write(at, script.made(me(), row));
    for (std::size_t k = 0; k < top_k && script.by_expert(); ++k) {
      const std::size_t choice = at * top_k + k;
      if (experts[choice] < 0) continue;
      write(static_cast<std::size_t>(expert_rows[choice]),
            script.made(me(), ep_script::choice(row, k)));
    }
  }
  put(static_cast<std::uint16_t*>(exchange_.combine_buffer(of)), made);
}

void low_latency_rank::run(const ep_script& script) {
  round of;
  const auto got = exchange_.dispatch(upload(script), of, stream_);
  EXPECT_EQ(of.tokens(), script.counts[static_cast<std::size_t>(me())]);
  expect_received(script, got);
  write_outputs(script, of, got);
  exchange_.combine(of, out(0), nullptr, stream_);
  EXPECT_EQ(sums(script, 0), combined(script, me(), {}));
  exchange_.check();
  EXPECT_EQ(exchange_.dead_ranks(), 0u);
}

}  // namespace evmm::test
