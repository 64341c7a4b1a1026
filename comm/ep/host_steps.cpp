// SPDX-License-Identifier: Apache-2.0
// The steps as host functions, for the host driver: the same protocol, written to be read. The
// kernels do the same side by side.
#include "comm/ep/bf16.hpp"
#include "comm/ep/ep_steps.hpp"
#include "comm/ep/host_permute.hpp"
#include "comm/ep/host_rows.hpp"
#include "lib/support/patience.hpp"

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
            const ep_totals& totals, native_stream stream) override {
    on_.launch(stream, [=, this] {
      fill_plan(shape, from, to, totals);
      meet_for_counts(shape, to, totals, ++planned_);
    });
  }
  void plan_again(const ep_shape& shape, const plan_arrays& by, const ep_totals& totals,
                  native_stream stream) override {
    on_.launch(stream, [=, this] { meet_for_counts(shape, by, totals, ++planned_); });
  }
  void send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
            const ep_totals& totals, std::uint64_t ticket, native_stream stream) override {
    on_.launch(stream, [=, this] {
      std::memcpy(totals.on_host, totals.words,
                  static_cast<std::size_t>(1 + shape.count_words()) * sizeof(std::int32_t));
      host_raise(totals.most_rows_on_host, static_cast<std::uint64_t>(totals.words[0]));
      host_raise(totals.ticket_on_host, ticket);  // a replayed graph brings one from before
      run_send(shape, from, by);
      meet_peers(shape, flag_kind::rows, totals, ++sent_);
    });
  }
  void combine(const ep_shape& shape, int count, const plan_arrays& by, const combine_output& to,
               const ep_totals& totals, native_stream stream) override {
    on_.launch(stream, [=, this] {
      meet_peers(shape, flag_kind::ready, totals, ++combined_);
      host_combine(shape, count, by, to);
      meet_peers(shape, flag_kind::finished, totals, combined_);
    });
  }

  void place(const ep_shape& shape, const expert_layout& to, native_stream stream) override {
    on_.launch(stream, [=] { host_place(shape, to); });
  }
  void permute(const ep_shape& shape, const expert_layout& to, native_stream stream) override {
    on_.launch(stream, [=] { host_permute(shape, to); });
  }
  void unpermute(const ep_shape& shape, const expert_layout& from, bool weighted,
                 native_stream stream) override {
    on_.launch(stream, [=] { host_unpermute(shape, from, weighted); });
  }
  void permute_gradients(const ep_shape& shape, const expert_layout& to, const void* outputs,
                         native_stream stream) override {
    on_.launch(stream,
               [=] { host_permute_gradients(shape, to, static_cast<const bf16*>(outputs)); });
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
    patience rest;
    for (int r = 0; r < shape.ranks; ++r) {
      while (read_signal(shape.flag(shape.rank, kind, r)) < shape.goal(kind, round)) {
        if (std::chrono::steady_clock::now() > end) {
          __atomic_fetch_or(totals.lost_on_host, std::uint64_t{1} << r, __ATOMIC_RELAXED);
          break;
        }
        rest.spend();
      }
    }
  }
  static void meet_peers(const ep_shape& shape, flag_kind kind, const ep_totals& totals,
                         std::uint64_t round) {
    tell_peers(shape, kind, round);
    wait_for_peers(shape, kind, totals, round);
  }

  static void fill_plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
                        const ep_totals& totals) {
    const int words = shape.count_words();
    std::fill_n(to.messages, shape.ranks * words, 0);
    for (int t = 0; t < from.count; ++t) {
      const std::uint64_t mask = ranks_of(shape, from, t, totals);
      for (int k = 0; k < shape.top_k; ++k) {
        const std::int64_t expert = from.ids[t * shape.top_k + k];
        if (expert < 0 || expert >= shape.ranks * shape.local_experts) continue;
        const auto r = static_cast<int>(expert) / shape.local_experts;
        ++to.messages[r * words + shape.ranks + static_cast<int>(expert) % shape.local_experts];
      }
      to.masks[t] = mask;
      for (int r = 0; r < shape.ranks; ++r) {
        const bool goes = (mask >> r & 1) != 0;
        to.places[t * shape.ranks + r] = goes ? to.messages[r]++ : -1;
      }
    }
    // Every peer is told how many rows go to each rank: those to rank r were counted in word r.
    for (int r = 1; r < shape.ranks; ++r) {
      std::copy_n(to.messages, shape.ranks, to.messages + r * words);
    }
  }

  static void meet_for_counts(const ep_shape& shape, const plan_arrays& to, const ep_totals& totals,
                              std::uint64_t round) {
    for (int r = 0; r < shape.ranks; ++r) {
      std::copy_n(to.messages + r * shape.count_words(), shape.count_words(),
                  shape.count_message(r, shape.rank));
    }
    meet_peers(shape, flag_kind::counts, totals, round);
    std::int32_t* const source_end = totals.words + 1;
    std::int32_t* const expert_tokens = source_end + shape.ranks;
    for (int r = 0; r < shape.ranks; ++r) {
      to.first[r] = 0;
      for (int s = r; s != shape.rank; s = (s + 1) % shape.ranks) {
        to.first[r] += shape.count_message(shape.rank, s)[r];
      }
    }
    std::int32_t rows = 0;
    std::fill_n(expert_tokens, shape.local_experts, 0);
    for (int turn = 0; turn < shape.ranks; ++turn) {
      const int s = (shape.rank + turn) % shape.ranks;
      const std::int32_t* message = shape.count_message(shape.rank, s);
      source_end[s] = rows += message[shape.rank];
      for (int e = 0; e < shape.local_experts; ++e) expert_tokens[e] += message[shape.ranks + e];
    }
    totals.words[0] = rows;
  }

  static void run_send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by) {
    host_row row(shape);
    for (int t = 0; t < from.count; ++t) {
      row.load(from, t);
      for (int r = 0; r < shape.ranks; ++r) {
        if ((by.masks[t] >> r & 1) == 0) continue;
        row.store(from, t, r,
                  static_cast<std::size_t>(by.first[r] + by.places[t * shape.ranks + r]));
      }
    }
  }

  driver& on_;
  std::uint64_t planned_ = 0, sent_ = 0, combined_ = 0;  ///< rounds, counted on the stream
};

}  // namespace

std::unique_ptr<ep_steps> make_host_steps(driver& on) {
  return std::make_unique<host_steps>(on);
}

}  // namespace evmm::ep
