// SPDX-License-Identifier: Apache-2.0
// A low-latency exchange as host functions, for the host driver: written to be read.
#include "comm/ep/bf16.hpp"
#include "comm/ep/host_permute.hpp"
#include "comm/ep/host_rows.hpp"
#include "comm/ep/low_latency_steps.hpp"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cmath>
#include <vector>

namespace evmm::ep {

namespace {

bool is_dead(std::uint64_t dead, int r) {
  return (dead >> r & 1) != 0;
}

class host_low_latency_steps final : public low_latency_steps {
 public:
  explicit host_low_latency_steps(driver& on) : on_(on) {}

  void issue_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                      const token_arrays& from, const ep_totals& totals, bool wait,
                      native_stream stream) override {
    on_.launch(stream, [=, this] {
      send(shape, slot, from, totals);
      tell_living(shape, slot, flag_kind::rows, ++sent_[set]);
      if (wait) receive(set, shape, slot, totals);
    });
  }
  void wait_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                     const expert_layout* to, const ep_totals& totals,
                     native_stream stream) override {
    const bool arrange = to != nullptr;
    on_.launch(stream, [=, this, to = arrange ? *to : expert_layout{}] {
      receive(set, shape, slot, totals);
      if (!arrange) return;
      host_place(shape, to);
      host_permute(shape, to);
    });
  }
  void issue_combine(int set, const ep_shape& shape, const low_latency_slot& slot,
                     const expert_layout& made, bool by_expert, int count, const combine_output* to,
                     const ep_totals& totals, native_stream stream) override {
    const bool wait = to != nullptr;
    on_.launch(stream, [=, this, to = wait ? *to : combine_output{}] {
      send_back(shape, slot, made, by_expert);
      tell_living(shape, slot, flag_kind::sums, ++returned_[set]);
      if (wait) sum(set, shape, slot, count, to, totals);
    });
  }
  void wait_combine(int set, const ep_shape& shape, const low_latency_slot& slot,
                    const expert_layout&, int count, const combine_output& to,
                    const ep_totals& totals, native_stream stream) override {
    on_.launch(stream, [=, this] { sum(set, shape, slot, count, to, totals); });
  }

 private:
  static void tell_living(const ep_shape& shape, const low_latency_slot& slot, flag_kind kind,
                          std::uint64_t round) {
    for (int r = 0; r < shape.ranks; ++r) {
      if (!is_dead(*slot.dead, r)) {
        signal(shape.flag(r, kind, shape.rank), shape.goal(kind, round));
      }
    }
  }
  static void wait_for_living(const ep_shape& shape, const low_latency_slot& slot, flag_kind kind,
                              const ep_totals& totals, std::uint64_t round) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(shape.timeout_ns);
    for (int r = 0; r < shape.ranks; ++r) {
      while (!is_dead(*slot.dead, r) &&
             read_signal(shape.flag(shape.rank, kind, r)) < shape.goal(kind, round)) {
        if (std::chrono::steady_clock::now() > end) {
          *slot.dead |= std::uint64_t{1} << r;
          __atomic_fetch_or(totals.lost_on_host, std::uint64_t{1} << r, __ATOMIC_RELAXED);
        }
        relax();
      }
    }
  }

  static void send(const ep_shape& shape, const low_latency_slot& slot, const token_arrays& from,
                   const ep_totals& totals) {
    host_row row(shape);
    std::vector<std::int32_t> going(static_cast<std::size_t>(shape.ranks));
    for (int t = 0; t < from.count; ++t) {
      slot.masks[t] = ranks_of(shape, from, t, totals) & ~*slot.dead;
      row.load(from, t);
      int index = 0;
      for (int r = 0; r < shape.ranks; ++r) {
        if ((slot.masks[t] >> r & 1) == 0) continue;
        const auto to = static_cast<std::size_t>(shape.rank * slot.max_tokens +
                                                 going[static_cast<std::size_t>(r)]++);
        row.store(from, t, r, to);
        shape.at<std::int32_t>(r, slot.origins)[to] = t * slot.width + index++;
      }
    }
    for (int r = 0; r < shape.ranks; ++r) {
      if (is_dead(*slot.dead, r)) continue;
      shape.at<std::int32_t>(r, slot.source_rows)[shape.rank] = going[static_cast<std::size_t>(r)];
    }
  }

  void receive(int set, const ep_shape& shape, const low_latency_slot& slot,
               const ep_totals& totals) const {
    wait_for_living(shape, slot, flag_kind::rows, totals, sent_[set]);
    for (int r = 0; r < shape.ranks; ++r) {
      if (is_dead(*slot.dead, r)) {
        shape.at<std::int32_t>(shape.rank, slot.source_rows)[r] = 0;
      }
    }
  }

  static void send_back(const ep_shape& shape, const low_latency_slot& slot,
                        const expert_layout& made, bool by_expert) {
    const auto hidden = static_cast<std::size_t>(shape.hidden);
    if (by_expert) host_unpermute(shape, made, true);
    for (int s = 0; s < shape.ranks; ++s) {
      if (is_dead(*slot.dead, s)) continue;
      for (int i = 0; i < made.rows.filled[s]; ++i) {
        const auto place = static_cast<std::size_t>(s * slot.max_tokens + i);
        const auto origin =
            static_cast<std::size_t>(shape.at<std::int32_t>(shape.rank, slot.origins)[place]);
        std::copy_n(shape.at<bf16>(shape.rank, shape.y) + place * hidden, hidden,
                    shape.at<bf16>(s, slot.returns) + origin * hidden);
      }
    }
  }

  void sum(int set, const ep_shape& shape, const low_latency_slot& slot, int count,
           const combine_output& to, const ep_totals& totals) const {
    wait_for_living(shape, slot, flag_kind::sums, totals, returned_[set]);
    const auto hidden = static_cast<std::size_t>(shape.hidden);
    const bf16* const returns = shape.at<bf16>(shape.rank, slot.returns);
    std::vector<float> sums(hidden);
    for (int t = 0; t < count; ++t) {
      const std::size_t begin = static_cast<std::size_t>(t) * hidden;
      for (std::size_t i = 0; i < hidden; ++i) {
        sums[i] = to.bias == nullptr ? 0 : to_float(static_cast<const bf16*>(to.bias)[begin + i]);
      }
      auto row = static_cast<std::size_t>(t * slot.width);
      for (std::uint64_t left = slot.masks[t]; left != 0; left &= left - 1, ++row) {
        if (is_dead(*slot.dead, std::countr_zero(left))) continue;
        for (std::size_t i = 0; i < hidden; ++i) sums[i] += to_float(returns[row * hidden + i]);
      }
      for (std::size_t i = 0; i < hidden; ++i) {
        static_cast<bf16*>(to.sums)[begin + i] = to_bf16(sums[i]);
      }
    }
  }

  driver& on_;
  std::uint64_t sent_[2] = {}, returned_[2] = {};  ///< rounds of each set, counted on the stream
};

}  // namespace

std::unique_ptr<low_latency_steps> make_host_low_latency_steps(driver& on) {
  return std::make_unique<host_low_latency_steps>(on);
}

}  // namespace evmm::ep
