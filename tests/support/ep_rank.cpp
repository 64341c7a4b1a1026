// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_rank.hpp"

#include "comm/ep/bf16.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <span>

namespace evmm::test {

using namespace evmm::units;

ep_script script_for(const rank_context& at, ep::exchange_options options) {
  const int ranks = at.ranks->size();
  options.experts *= ranks;
  // Nodes are counted in the order of their first ranks.
  const auto firsts = at.ranks->all_gather_value(at.ranks->node_ranks().front().value, "nodes");
  std::vector<int> node_of;
  for (const int first : firsts) {
    int node = 0;
    for (std::size_t r = 0; r < firsts.size(); ++r) {
      node += firsts[r] == static_cast<int>(r) && firsts[r] < first;
    }
    node_of.push_back(node);
  }
  return {.options = options,
          .ranks = ranks,
          .node_of = node_of,
          .counts = std::vector<std::size_t>(static_cast<std::size_t>(ranks), options.max_tokens)};
}

ep_rank::ep_rank(const rank_context& at, const ep::exchange_options& options,
                 const channel_options& across)
    : ep_tensors(at, options, 1_GiB, 2_MiB),
      exchange_(make_exchange(options, across)),
      plan_(exchange_.make_plan()) {
  const std::size_t most = options.max_tokens;
  weight_gradients_ = {heap_, most * static_cast<std::size_t>(options.top_k)};
  out_ = {heap_, most * options.hidden};
  bias_ = {heap_, most * options.hidden};
  outputs_ = {heap_, combine_elements()};
}

ep::exchange& ep_rank::make_exchange(const ep::exchange_options& options,
                                     const channel_options& across) {
  if (at_.ranks->node_count() == 1) return made_.emplace(heap_, options);
  across_.emplace(heap_.region(), across);
  return made_.emplace(heap_, *across_, options);
}

ep_rank::~ep_rank() {
  // Others may still wait for what this rank sent last.
  if (across_) {
    EXPECT_NO_THROW(across_->close());
  }
  at_.on->synchronize(stream_);
}

std::size_t ep_rank::combine_elements() const {
  const bool by_expert = exchange_.options().arranged == ep::layout::by_expert;
  return (by_expert ? exchange_.expert_capacity() : exchange_.capacity()) *
         exchange_.options().hidden;
}

ep::tokens ep_rank::upload_gradients(const ep_script& script, const ep_script& routing) {
  ep::tokens from = upload(routing);
  put(x_.local(), script.gradients(me()));
  from.scales = nullptr;
  return from;
}

void ep_rank::expect_received(const ep_script& script, const ep::received& got,
                              const ep_script& routing) {
  got_ = got;
  const auto expected = rows_received(routing, me());
  const ep::row_counts counts = exchange_.counts();
  ASSERT_EQ(counts.rows, expected.size());
  EXPECT_EQ(get(got.rows, 1)[0], static_cast<std::int32_t>(expected.size()));
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  const int local = script.options.experts / script.ranks;
  const auto experts = get(got.experts, expected.size() * top_k);
  const auto weights = get(got.weights, expected.size() * top_k);
  const auto tokens = get(got.tokens, expected.size());
  std::vector<std::size_t> by_expert(static_cast<std::size_t>(local));
  const auto mates = script.ranks_of(script.node_of[static_cast<std::size_t>(me())]);
  std::vector<std::int32_t> expected_ends;
  for (const int via : mates) {
    // Rows of its own come first.
    const auto turn = [&](int of) { return of < me() ? of + script.ranks : of; };
    expected_ends.push_back(static_cast<std::int32_t>(
        std::count_if(expected.begin(), expected.end(),
                      [&](const ep_row& row) { return turn(row.via) <= turn(via); })));
  }
  std::size_t wrong = 0;
  for (int source = 0; source < script.ranks; ++source) {
    const auto ids = routing.ids(source);
    const auto sent_weights = routing.weights(source);
    for (std::size_t row = 0; row < expected.size(); ++row) {
      if (expected[row].source != source) continue;
      const std::size_t t = expected[row].token;
      wrong += tokens[row] != static_cast<std::int32_t>(expected[row].index);
      for (std::size_t k = 0; k < top_k; ++k) {
        const std::int64_t id = ids[t * top_k + k];
        const bool here = id >= 0 && id / local == me();
        if (here) ++by_expert[static_cast<std::size_t>(id % local)];
        wrong += experts[row * top_k + k] != (here ? id % local : -1);
        wrong += weights[row * top_k + k] != (here ? sent_weights[t * top_k + k] : 0);
      }
    }
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(get(got.source_end, mates.size()), expected_ends);
  EXPECT_EQ(counts.by_expert, by_expert);
  const auto expert_tokens = get(got.expert_tokens, by_expert.size());
  EXPECT_EQ(std::vector<std::size_t>(expert_tokens.begin(), expert_tokens.end()), by_expert);
  EXPECT_EQ(counts.spilled,
            expected.size() - std::min(expected.size(), exchange_.options().device_rows));
  if (script.by_expert()) {
    expect_by_expert(script, got, expected);
  } else {
    const ep_sent sent(script);
    const auto x = get(static_cast<const std::byte*>(got.x), expected.size() * script.row_bytes());
    const auto scales =
        get(got.scales, script.scaled() ? expected.size() * script.scale_count() : 0);
    for (std::size_t row = 0; row < expected.size(); ++row) {
      wrong += !sent.is_row(expected[row], x, scales, row);
    }
    EXPECT_EQ(wrong, 0u);
  }
}

void ep_rank::expect_by_expert(const ep_script& script, const ep::received& got,
                               const std::vector<ep_row>& rows) {
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  const auto local = static_cast<std::size_t>(script.options.experts / script.ranks);
  const ep::row_counts counts = exchange_.counts();
  const auto begin = get(got.expert_begin, local + 1);
  const auto all = static_cast<std::size_t>(begin[local]);
  ASSERT_EQ(all, counts.expert_rows);
  EXPECT_TRUE(
      std::equal(begin.begin(), begin.end(), counts.expert_begin.begin(), counts.expert_begin.end(),
                 [](std::int32_t a, std::size_t b) { return static_cast<std::size_t>(a) == b; }));
  ASSERT_LE(all, got.expert_capacity);
  const auto experts = get(got.experts, rows.size() * top_k);
  const auto expert_rows = get(got.expert_rows, rows.size() * top_k);
  const ep_sent sent(script);
  const auto x = get(static_cast<const std::byte*>(got.x), all * script.row_bytes());
  const auto scales = get(got.scales, script.scaled() ? all * script.scale_count() : 0);
  std::vector<std::int32_t> expected_experts(all, -1), expected_places(all, -1);
  std::vector<std::int32_t> next(begin.begin(), begin.end());
  std::size_t wrong = 0;
  for (std::size_t row = 0; row < rows.size(); ++row) {
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::int32_t expert = experts[row * top_k + k];
      if (expert < 0) continue;
      const std::int32_t at = next[static_cast<std::size_t>(expert)]++;
      wrong += expert_rows[row * top_k + k] != at;
      const auto place = static_cast<std::size_t>(at);
      ASSERT_LT(place, all);
      expected_experts[place] = expert;
      expected_places[place] = static_cast<std::int32_t>(row);
      wrong += !sent.is_row(rows[row], x, scales, place);
    }
  }
  EXPECT_EQ(wrong, 0u);
  EXPECT_EQ(get(got.row_experts, all), expected_experts);
  EXPECT_EQ(get(got.row_places, all), expected_places);
  const auto alignment = static_cast<std::int32_t>(script.options.expert_alignment);
  for (std::size_t e = 0; e < local; ++e) {
    EXPECT_EQ(begin[e] % alignment, 0);
    EXPECT_EQ(static_cast<std::size_t>(next[e] - begin[e]), counts.by_expert[e]);
    EXPECT_LT(begin[e + 1] - next[e], alignment);
  }
}

void ep_rank::write_outputs(const ep_script& script) {
  const std::size_t hidden = script.options.hidden;
  const auto rows = rows_received(script, me());
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  std::vector<std::uint16_t> made(combine_elements(), 0x7fff);
  const auto write = [&](std::size_t at, const std::vector<std::uint16_t>& one) {
    std::copy(one.begin(), one.end(), made.begin() + static_cast<std::ptrdiff_t>(at * hidden));
  };
  if (!script.by_expert()) {
    for (std::size_t row = 0; row < rows.size(); ++row) write(row, script.made(me(), row));
  } else {
    const auto experts = get(got_.experts, rows.size() * top_k);
    const auto expert_rows = get(got_.expert_rows, rows.size() * top_k);
    for (std::size_t at = 0; at < experts.size(); ++at) {
      if (experts[at] < 0) continue;
      write(static_cast<std::size_t>(expert_rows[at]),
            script.made(me(), script.choice(at / top_k, at % top_k)));
    }
  }
  put(static_cast<std::uint16_t*>(exchange_.combine_buffer()), made);
}

std::vector<std::uint16_t> ep_rank::combine(const ep_script& script, bool with_bias) {
  write_outputs(script);
  put(bias_.local(), bias_of(script, with_bias));
  at_.on->fill(reinterpret_cast<address>(out_.local()), std::byte{0xee}, out_.bytes(), stream_);
  exchange_.combine(plan_, out_.local(), with_bias ? bias_.local() : nullptr, stream_);
  return get(out_.local(), script.counts[static_cast<std::size_t>(me())] * script.options.hidden);
}

std::vector<std::uint16_t> ep_rank::bias_of(const ep_script& script, bool wanted) const {
  if (!wanted) return {};
  std::vector<std::uint16_t> all;
  for (std::size_t t = 0; t < script.counts[static_cast<std::size_t>(me())]; ++t) {
    const auto one = script.made(99, t);
    all.insert(all.end(), one.begin(), one.end());
  }
  return all;
}

void ep_rank::run(const ep_script& script, bool with_bias) {
  const ep::received got = exchange_.dispatch(upload(script), plan_, stream_);
  expect_received(script, got);
  EXPECT_EQ(combine(script, with_bias), combined(script, me(), bias_of(script, with_bias)));
  exchange_.check();
}

void ep_rank::run_backward(const ep_script& script) {
  const std::size_t hidden = script.options.hidden;
  const auto top_k = static_cast<std::size_t>(script.options.top_k);
  const auto rows = rows_received(script, me());
  auto* const buffer = static_cast<std::uint16_t*>(exchange_.combine_buffer());
  // What the experts had made, kept by the user.
  write_outputs(script);
  at_.on->copy(reinterpret_cast<address>(outputs_.local()), reinterpret_cast<address>(buffer),
               outputs_.bytes(), stream_);
  const ep::tokens sums = upload_gradients(script, script);
  const ep::received got = exchange_.combine_backward(
      sums, plan_, script.by_expert() ? outputs_.local() : nullptr, stream_);
  ASSERT_EQ(got.x, buffer);
  const auto experts = get(got.experts, rows.size() * top_k);
  const auto weights = get(got.weights, rows.size() * top_k);
  std::size_t wrong = 0;
  std::vector<float> row_weight_gradients(rows.size() * top_k);
  for (std::size_t row = 0; row < rows.size(); ++row) {
    const auto sent = script.gradients(rows[row].source);
    const auto* const gradient = &sent[rows[row].token * hidden];
    if (!script.by_expert()) {
      const auto came = get(buffer + row * hidden, hidden);
      wrong += std::memcmp(came.data(), gradient, hidden * 2) != 0;
      for (std::size_t k = 0; k < top_k; ++k) {
        row_weight_gradients[row * top_k + k] = static_cast<float>(row * 100 + k);
      }
      continue;
    }
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::size_t at = row * top_k + k;
      if (experts[at] < 0) continue;
      const auto place = static_cast<std::size_t>(get(got.expert_rows + at, 1)[0]);
      const auto came = get(buffer + place * hidden, hidden);
      const auto made = script.made(me(), script.choice(row, k));
      double dot = 0;
      double size = 0;
      for (std::size_t i = 0; i < hidden; ++i) {
        const float g = ep::to_float({gradient[i]});
        wrong += came[i] != ep::to_bf16(g * weights[at]).bits;
        dot += static_cast<double>(g) * static_cast<double>(ep::to_float({made[i]}));
        size += std::fabs(static_cast<double>(g) * static_cast<double>(ep::to_float({made[i]})));
      }
      const float told = get(exchange_.weight_gradients() + at, 1)[0];
      EXPECT_NEAR(static_cast<double>(told), dot, size * 1e-5);
      row_weight_gradients[at] = told;
    }
  }
  EXPECT_EQ(wrong, 0u);
  if (!script.by_expert()) put(exchange_.weight_gradients(), row_weight_gradients);

  // The experts' own gradients: what made() says, for other numbers.
  auto other = script;
  other.seed += 1000;
  other.routing_seed = script.routing();
  write_outputs(other);
  exchange_.dispatch_backward(plan_, out_.local(), ids_.local(), weight_gradients_.local(),
                              stream_);
  const std::size_t count = script.counts[static_cast<std::size_t>(me())];
  EXPECT_EQ(get(out_.local(), count * hidden), combined(other, me(), {}, false));
  // Every rank tells what it made, to be compared where it was brought.
  const auto brought = get(weight_gradients_.local(), count * top_k);
  const auto told = at_.ranks->all_gather(std::as_bytes(std::span(row_weight_gradients)),
                                          "the gradients of weights");
  const auto ids = script.ids(me());
  const int local = script.options.experts / script.ranks;
  for (std::size_t t = 0; t < count; ++t) {
    for (std::size_t k = 0; k < top_k; ++k) {
      const std::int64_t id = ids[t * top_k + k];
      float expected = 0;
      if (id >= 0) {
        const auto r = static_cast<int>(id / local);
        const auto there = rows_received(script, r);
        const auto row = std::find_if(there.begin(), there.end(), [&](const ep_row& one) {
          return one.source == me() && one.token == t;
        });
        const std::size_t at = static_cast<std::size_t>(row - there.begin()) * top_k + k;
        std::memcpy(&expected, &told[static_cast<std::size_t>(r)][at * sizeof(float)],
                    sizeof(float));
      }
      EXPECT_EQ(brought[t * top_k + k], expected) << "token " << t << " choice " << k;
    }
  }
  exchange_.check();
}

}  // namespace evmm::test
