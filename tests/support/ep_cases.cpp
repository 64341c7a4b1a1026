// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"

#include "tests/support/ep_reference.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

namespace evmm::test {

using namespace evmm::units;
using ::testing::HasSubstr;

namespace {

/// One rank's side of exchanges: its tensors, and what is checked.
class ep_rank {
 public:
  ep_rank(const rank_context& at, const ep::exchange_options& options)
      : at_(at),
        heap_(at.make({.reserve = 1_GiB}), {.growth_step = 2_MiB}),
        exchange_(heap_, options),
        plan_(exchange_.make_plan()),
        stream_(at.on->create_stream(at.device)) {
    const std::size_t most = options.max_tokens;
    const auto top_k = static_cast<std::size_t>(options.top_k);
    x_ = {heap_, most * options.hidden * 2};
    scales_ = {heap_, most * options.hidden / 128};
    ids_ = {heap_, most * top_k};
    weights_ = {heap_, most * top_k};
    out_ = {heap_, most * options.hidden};
    bias_ = {heap_, most * options.hidden};
  }
  ~ep_rank() {
    at_.on->synchronize(stream_);
    at_.on->destroy_stream(stream_);
  }

  int me() const { return at_.ranks->rank().value; }
  native_stream stream() const { return stream_; }
  ep::exchange& exchange() { return exchange_; }
  ep::plan& plan() { return plan_; }

  ep::tokens upload(const ep_script& script) {
    put(x_.local(), script.rows(me()));
    if (script.options.rows == ep::payload::fp8) put(scales_.local(), script.scales(me()));
    put(ids_.local(), script.ids(me()));
    put(weights_.local(), script.weights(me()));
    return {.x = x_.local(),
            .scales = script.options.rows == ep::payload::fp8 ? scales_.local() : nullptr,
            .topk_ids = ids_.local(),
            .topk_weights = weights_.local(),
            .count = script.counts[static_cast<std::size_t>(me())]};
  }

  /// `by_plan`: the rows came by dispatch_again, so their experts are those of `routing`.
  void expect_received(const ep_script& script, const ep::received& got, const ep_script& routing) {
    const auto expected = rows_received(routing, me());
    const ep::row_counts counts = exchange_.counts();
    ASSERT_EQ(counts.rows, expected.size());
    EXPECT_EQ(get(got.rows, 1)[0], static_cast<std::int32_t>(expected.size()));
    const auto ends = get(got.source_end, static_cast<std::size_t>(script.ranks));
    const auto top_k = static_cast<std::size_t>(script.options.top_k);
    const int local = script.options.experts / script.ranks;
    const auto experts = get(got.experts, expected.size() * top_k);
    const auto weights = get(got.weights, expected.size() * top_k);
    const auto tokens = get(got.tokens, expected.size());
    const std::size_t row_bytes = script.row_bytes();
    const auto x = get(static_cast<const std::byte*>(got.x), expected.size() * row_bytes);
    std::vector<float> scales;
    if (script.options.rows == ep::payload::fp8) {
      scales = get(static_cast<const float*>(got.scales), expected.size() * script.scale_count());
    }
    std::vector<std::size_t> by_expert(static_cast<std::size_t>(local));
    std::size_t wrong = 0;
    for (int source = 0; source < script.ranks; ++source) {
      const auto sent = script.rows(source);
      const auto sent_scales = script.scales(source);
      const auto ids = routing.ids(source);
      const auto sent_weights = routing.weights(source);
      std::size_t end = 0;
      for (std::size_t row = 0; row < expected.size(); ++row) {
        if (expected[row].source <= source) end = row + 1;
        if (expected[row].source != source) continue;
        const std::size_t t = expected[row].token;
        wrong += tokens[row] != static_cast<std::int32_t>(t);
        wrong += std::memcmp(&x[row * row_bytes], &sent[t * row_bytes], row_bytes) != 0;
        if (!scales.empty()) {
          wrong += std::memcmp(&scales[row * script.scale_count()],
                               &sent_scales[t * script.scale_count()],
                               script.scale_count() * sizeof(float)) != 0;
        }
        for (std::size_t k = 0; k < top_k; ++k) {
          const std::int64_t id = ids[t * top_k + k];
          const bool here = id >= 0 && id / local == me();
          if (here) ++by_expert[static_cast<std::size_t>(id % local)];
          wrong += experts[row * top_k + k] != (here ? id % local : -1);
          wrong += weights[row * top_k + k] != (here ? sent_weights[t * top_k + k] : 0);
        }
      }
      EXPECT_EQ(ends[static_cast<std::size_t>(source)], static_cast<std::int32_t>(end));
    }
    EXPECT_EQ(wrong, 0u);
    EXPECT_EQ(counts.by_expert, by_expert);
    EXPECT_EQ(counts.spilled,
              expected.size() - std::min(expected.size(), exchange_.options().device_rows));
  }

  /// Writes what the experts make, and combines. Returns the output.
  std::vector<std::uint16_t> combine(const ep_script& script, bool with_bias) {
    const std::size_t hidden = script.options.hidden;
    const std::size_t rows = rows_received(script, me()).size();
    std::vector<std::uint16_t> made;
    for (std::size_t row = 0; row < rows; ++row) {
      const auto one = script.made(me(), row);
      made.insert(made.end(), one.begin(), one.end());
    }
    put(static_cast<std::uint16_t*>(exchange_.combine_buffer()), made);
    const auto bias = bias_of(script, with_bias);
    put(bias_.local(), bias);
    at_.on->fill(reinterpret_cast<address>(out_.local()), std::byte{0xee}, out_.bytes(), stream_);
    exchange_.combine(plan_, out_.local(), with_bias ? bias_.local() : nullptr, stream_);
    return get(out_.local(), script.counts[static_cast<std::size_t>(me())] * hidden);
  }
  std::vector<std::uint16_t> bias_of(const ep_script& script, bool wanted) const {
    if (!wanted) return {};
    std::vector<std::uint16_t> all;
    for (std::size_t t = 0; t < script.counts[static_cast<std::size_t>(me())]; ++t) {
      const auto one = script.made(99, t);
      all.insert(all.end(), one.begin(), one.end());
    }
    return all;
  }

  /// A whole exchange, verified.
  void run(const ep_script& script, bool with_bias) {
    const ep::received got = exchange_.dispatch(upload(script), plan_, stream_);
    expect_received(script, got, script);
    EXPECT_EQ(combine(script, with_bias), combined(script, me(), bias_of(script, with_bias)));
    exchange_.check();
  }

  template <class T>
  std::vector<T> get(const T* from, std::size_t count) {
    std::vector<T> all(count);
    if (count == 0) return all;
    at_.on->copy(reinterpret_cast<address>(all.data()), reinterpret_cast<address>(from),
                 count * sizeof(T), stream_);
    at_.on->synchronize(stream_);
    return all;
  }
  template <class T, class U>
  void put(T* to, const std::vector<U>& all) {
    if (all.empty()) return;
    at_.on->copy(reinterpret_cast<address>(to), reinterpret_cast<address>(all.data()),
                 all.size() * sizeof(U), stream_);
    at_.on->synchronize(stream_);
  }

 private:
  const rank_context& at_;
  symmetric_heap heap_;
  ep::exchange exchange_;
  ep::plan plan_;
  native_stream stream_;
  symmetric_buffer<std::byte> x_;
  symmetric_buffer<float> scales_, weights_;
  symmetric_buffer<std::int64_t> ids_;
  symmetric_buffer<std::uint16_t> out_, bias_;
};

ep_script script_for(const rank_context& at, ep::exchange_options options) {
  const int ranks = at.ranks->size();
  options.experts *= ranks;
  ep_script script{
      .options = options,
      .ranks = ranks,
      .counts = std::vector<std::size_t>(static_cast<std::size_t>(ranks), options.max_tokens)};
  return script;
}

void rows_arrive_and_are_combined(const rank_context& at) {
  auto script =
      script_for(at, {.experts = 4, .top_k = 4, .hidden = 512, .max_tokens = 150, .sms = 4});
  script.seed = 1;
  script.masked = 5;
  ep_rank mine(at, script.options);
  mine.run(script, false);
  // Other counts on every rank, none on the first.
  for (std::size_t r = 0; r < script.counts.size(); ++r) script.counts[r] = r * 37;
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

void a_plan_sends_other_rows_by_the_same_routing(const rank_context& at) {
  auto script =
      script_for(at, {.experts = 4, .top_k = 2, .hidden = 256, .max_tokens = 64, .sms = 2});
  script.seed = 5;
  ep_rank mine(at, script.options);
  mine.run(script, false);
  auto other = script;
  other.seed = 6;
  ep::tokens again = mine.upload(other);
  const auto got = mine.exchange().dispatch_again(again, mine.plan(), mine.stream());
  mine.expect_received(other, got, script);
  EXPECT_EQ(mine.combine(script, false), combined(script, mine.me(), {}));
  again.count = 1;
  EXPECT_THAT(thrown_by([&] { mine.exchange().dispatch_again(again, mine.plan(), mine.stream()); }),
              HasSubstr("cannot dispatch 1 tokens by a plan of 64"));
}

void wrong_exchanges_are_refused(const rank_context& at) {
  const auto refused = [&](const ep::exchange_options& options, const std::string& why) {
    symmetric_heap heap(at.make());
    EXPECT_THAT(thrown_by([&] { ep::exchange(heap, options); }), HasSubstr(why));
    heap.close();
  };
  const ep::exchange_options good{.experts = at.ranks->size(), .top_k = 1, .hidden = 128};
  auto bad = good;
  bad.experts = 0;
  refused(bad, "experts is 0");
  bad = good;
  bad.hidden = 100;
  refused(bad, "hidden is 100");
  bad = good;
  bad.top_k = 33;
  refused(bad, "top_k is 33");

  auto script =
      script_for(at, {.experts = 1, .top_k = 1, .hidden = 128, .max_tokens = 8, .sms = 1});
  ep_rank mine(at, script.options);
  auto tokens = mine.upload(script);
  tokens.count = 9;
  EXPECT_THAT(thrown_by([&] { mine.exchange().dispatch(tokens, mine.plan(), mine.stream()); }),
              HasSubstr("9 tokens, and the exchange was made for 8"));
  tokens.count = 8;
  tokens.topk_ids = nullptr;
  EXPECT_THAT(thrown_by([&] { mine.exchange().dispatch(tokens, mine.plan(), mine.stream()); }),
              HasSubstr("topk_ids is null"));
  mine.exchange().check();
}

void random_exchanges_are_exact(const rank_context& at) {
  run_random_exchanges(at, 12, 8);
}

}  // namespace

void run_random_exchanges(const rank_context& at, std::size_t count, std::uint64_t seed) {
  std::mt19937_64 same(seed);
  std::mt19937_64 own(seed + 1 + static_cast<std::uint64_t>(at.ranks->rank().value));
  for (std::size_t done = 0; done < count;) {
    auto script = script_for(at, {.experts = 1 + static_cast<int>(same() % 8),
                                  .top_k = 1 + static_cast<int>(same() % 8),
                                  .hidden = 128 * (1 + same() % 12),
                                  .rows = same() % 2 == 0 ? ep::payload::bf16 : ep::payload::fp8,
                                  .max_tokens = 1 + same() % 120,
                                  .device_rows = same() % 3 == 0 ? same() % 60 : 0,
                                  .sms = 1 + static_cast<int>(same() % 8)});
    ep_rank mine(at, script.options);
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
    }
  }
}

const std::vector<symmetric_case>& ep_cases() {
#define EVMM_CASE(name) \
  { #name, &name }
  static const std::vector<symmetric_case> all = {
      EVMM_CASE(rows_arrive_and_are_combined),
      EVMM_CASE(fp8_rows_bring_their_scales),
      EVMM_CASE(what_exceeds_the_expected_load_lies_in_host_memory),
      EVMM_CASE(a_plan_sends_other_rows_by_the_same_routing),
      EVMM_CASE(wrong_exchanges_are_refused),
      EVMM_CASE(random_exchanges_are_exact),
  };
#undef EVMM_CASE
  return all;
}

}  // namespace evmm::test
