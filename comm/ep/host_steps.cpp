// SPDX-License-Identifier: Apache-2.0
// The steps as host functions, for the host driver: the same protocol, written to be read. The
// kernels do the same side by side.
#include "comm/ep/bf16.hpp"
#include "comm/ep/ep_steps.hpp"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <vector>

namespace evmm::ep {

namespace {

class host_steps final : public ep_steps {
 public:
  explicit host_steps(driver& on) : on_(on) {}

  void plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
            const ep_totals& totals, std::uint64_t round, native_stream stream) override {
    on_.launch(stream, [=] { run_plan(shape, from, to, totals, round); });
  }
  void send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
            const ep_totals& totals, const send_rounds& rounds, bool met,
            native_stream stream) override {
    on_.launch(stream, [=] {
      if (!met) meet_peers(shape, flag_kind::counts, totals, rounds.counts);
      run_send(shape, from, by, totals, rounds.rows);
    });
  }
  void combine(const ep_shape& shape, int count, const plan_arrays& by, void* out, const void* bias,
               const ep_totals& totals, std::uint64_t round, native_stream stream) override {
    on_.launch(stream, [=] { run_combine(shape, count, by, out, bias, totals, round); });
  }

 private:
  static void tell_peers(const ep_shape& shape, flag_kind kind, std::uint64_t round) {
    for (int r = 0; r < shape.ranks; ++r) {
      signal(shape.flag(r, kind, shape.rank), shape.goal(kind, round));
    }
  }
  static void wait_for_peers(const ep_shape& shape, flag_kind kind, const ep_totals& totals,
                             std::uint64_t round) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(shape.timeout_ns);
    for (int r = 0; r < shape.ranks; ++r) {
      while (read_signal(shape.flag(shape.rank, kind, r)) < shape.goal(kind, round)) {
        if (std::chrono::steady_clock::now() > end) {
          __atomic_fetch_or(totals.lost_on_host, std::uint64_t{1} << r, __ATOMIC_RELAXED);
          break;
        }
        relax();
      }
    }
  }
  static void meet_peers(const ep_shape& shape, flag_kind kind, const ep_totals& totals,
                         std::uint64_t round) {
    tell_peers(shape, kind, round);
    wait_for_peers(shape, kind, totals, round);
  }

  static void run_plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
                       const ep_totals& totals, std::uint64_t round) {
    const auto ranks = static_cast<std::size_t>(shape.ranks);
    std::vector<std::int32_t> going(ranks);
    std::vector<std::int32_t> chosen(ranks * static_cast<std::size_t>(shape.local_experts));
    for (int t = 0; t < from.count; ++t) {
      std::uint64_t mask = 0;
      for (int k = 0; k < shape.top_k; ++k) {
        const std::int64_t expert = from.ids[t * shape.top_k + k];
        if (expert < 0) continue;
        if (expert >= shape.ranks * shape.local_experts) {
          signal(totals.wrong_on_host, static_cast<std::uint64_t>(expert) + 1);
          continue;
        }
        mask |= std::uint64_t{1} << (expert / shape.local_experts);
        ++chosen[static_cast<std::size_t>(expert)];
      }
      to.masks[t] = mask;
      for (int r = 0; r < shape.ranks; ++r) {
        to.places[t * shape.ranks + r] =
            (mask >> r & 1) != 0 ? going[static_cast<std::size_t>(r)]++ : -1;
      }
    }
    for (int r = 0; r < shape.ranks; ++r) {
      std::int32_t* message = shape.count_message(r, shape.rank);
      std::memcpy(message, going.data(), ranks * sizeof(std::int32_t));
      std::memcpy(message + shape.ranks, chosen.data() + r * shape.local_experts,
                  static_cast<std::size_t>(shape.local_experts) * sizeof(std::int32_t));
    }
    meet_peers(shape, flag_kind::counts, totals, round);
    std::int32_t* const source_end = totals.words + 1;
    std::int32_t* const expert_tokens = source_end + shape.ranks;
    for (int r = 0; r < shape.ranks; ++r) {
      to.first[r] = 0;
      for (int s = 0; s < shape.rank; ++s) {
        to.first[r] += shape.count_message(shape.rank, s)[r];
      }
    }
    std::int32_t rows = 0;
    std::memset(expert_tokens, 0,
                static_cast<std::size_t>(shape.local_experts) * sizeof(std::int32_t));
    for (int s = 0; s < shape.ranks; ++s) {
      const std::int32_t* message = shape.count_message(shape.rank, s);
      source_end[s] = rows += message[shape.rank];
      for (int e = 0; e < shape.local_experts; ++e) expert_tokens[e] += message[shape.ranks + e];
    }
    totals.words[0] = rows;
    std::memcpy(totals.on_host, totals.words,
                static_cast<std::size_t>(1 + shape.count_words()) * sizeof(std::int32_t));
    signal(totals.round_on_host, round);
  }

  static void run_send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
                       const ep_totals& totals, std::uint64_t round) {
    const auto scale_count = static_cast<std::size_t>(shape.scale_count);
    for (int t = 0; t < from.count; ++t) {
      for (int r = 0; r < shape.ranks; ++r) {
        if ((by.masks[t] >> r & 1) == 0) continue;
        const auto row = static_cast<std::size_t>(by.first[r] + by.places[t * shape.ranks + r]);
        const auto token = static_cast<std::size_t>(t);
        std::memcpy(shape.at<char>(r, shape.x) + row * shape.row_bytes,
                    from.x + token * shape.row_bytes, shape.row_bytes);
        std::copy_n(from.scales + token * scale_count, scale_count,
                    shape.at<float>(r, shape.scales) + row * scale_count);
        if (from.ids == nullptr) continue;
        shape.at<std::int32_t>(r, shape.tokens)[row] = t;
        for (int k = 0; k < shape.top_k; ++k) {
          const std::int64_t expert = from.ids[t * shape.top_k + k];
          const bool here = expert >= 0 && expert / shape.local_experts == r;
          const auto at = row * static_cast<std::size_t>(shape.top_k) + static_cast<std::size_t>(k);
          shape.at<std::int32_t>(r, shape.experts)[at] =
              here ? static_cast<std::int32_t>(expert % shape.local_experts) : -1;
          shape.at<float>(r, shape.weights)[at] = !here ? 0
                                                  : from.weights == nullptr
                                                      ? 1
                                                      : from.weights[t * shape.top_k + k];
        }
      }
    }
    meet_peers(shape, flag_kind::rows, totals, round);
  }

  static void run_combine(const ep_shape& shape, int count, const plan_arrays& by, void* out,
                          const void* bias, const ep_totals& totals, std::uint64_t round) {
    meet_peers(shape, flag_kind::ready, totals, round);
    const auto hidden = static_cast<std::size_t>(shape.hidden);
    std::vector<float> sum(hidden);
    for (int t = 0; t < count; ++t) {
      const std::size_t begin = static_cast<std::size_t>(t) * hidden;
      for (std::size_t i = 0; i < hidden; ++i) {
        sum[i] = bias == nullptr ? 0 : to_float(static_cast<const bf16*>(bias)[begin + i]);
      }
      for (int r = 0; r < shape.ranks; ++r) {
        if ((by.masks[t] >> r & 1) == 0) continue;
        const auto row = static_cast<std::size_t>(by.first[r] + by.places[t * shape.ranks + r]);
        const bf16* y = shape.at<bf16>(r, shape.y) + row * hidden;
        for (std::size_t i = 0; i < hidden; ++i) sum[i] += to_float(y[i]);
      }
      for (std::size_t i = 0; i < hidden; ++i) static_cast<bf16*>(out)[begin + i] = to_bf16(sum[i]);
    }
    meet_peers(shape, flag_kind::finished, totals, round);
  }

  driver& on_;
};

}  // namespace

std::unique_ptr<ep_steps> make_host_steps(driver& on) {
  return std::make_unique<host_steps>(on);
}

}  // namespace evmm::ep
