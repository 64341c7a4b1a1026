// SPDX-License-Identifier: Apache-2.0
// A low-latency exchange as host functions, for the host driver: written to be read.
#include "comm/ep/host_permute.hpp"
#include "comm/ep/host_rows.hpp"
#include "comm/ep/low_latency_steps.hpp"
#include "lib/support/patience.hpp"

#include <chrono>
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
      tell_living(shape, slot, flag_kind::rows);
      ++sent_[set];
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
  void issue_combine(const ep_shape& shape, const low_latency_slot& slot,
                     native_stream stream) override {
    on_.launch(stream, [=] { tell_living(shape, slot, flag_kind::ready); });
  }
  void wait_combine(int set, const ep_shape& shape, const low_latency_slot& slot, int count,
                    const combine_output& to, const ep_totals& totals, bool tell,
                    native_stream stream) override {
    on_.launch(stream, [=, this] {
      if (tell) tell_living(shape, slot, flag_kind::ready);
      wait_for_living(shape, slot, flag_kind::ready, totals, ++combined_[set]);
      host_combine(shape, count, slot.plan, to, *slot.dead);
    });
  }

 private:
  static void tell_living(const ep_shape& shape, const low_latency_slot& slot, flag_kind kind) {
    for (int r = 0; r < shape.ranks; ++r) {
      if (!is_dead(*slot.dead, r)) {
        signal_add(shape.flag(r, kind, shape.rank), shape.goal(kind, 1));
      }
    }
  }
  static void wait_for_living(const ep_shape& shape, const low_latency_slot& slot, flag_kind kind,
                              const ep_totals& totals, std::uint64_t round) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::nanoseconds(shape.timeout_ns);
    patience rest;
    for (int r = 0; r < shape.ranks; ++r) {
      while (!is_dead(*slot.dead, r) &&
             read_signal(shape.flag(shape.rank, kind, r)) < shape.goal(kind, round)) {
        if (std::chrono::steady_clock::now() > end) {
          *slot.dead |= std::uint64_t{1} << r;
          __atomic_fetch_or(totals.lost_on_host, std::uint64_t{1} << r, __ATOMIC_RELAXED);
        }
        rest.spend();
      }
    }
  }

  static void send(const ep_shape& shape, const low_latency_slot& slot, const token_arrays& from,
                   const ep_totals& totals) {
    host_row row(shape);
    std::vector<std::int32_t> going(static_cast<std::size_t>(shape.ranks));
    for (int t = 0; t < from.count; ++t) {
      slot.plan.masks[t] = ranks_of(shape, from, t, totals) & ~*slot.dead;
      row.load(from, t);
      for (int r = 0; r < shape.ranks; ++r) {
        std::int32_t& place = slot.plan.places[t * shape.ranks + r];
        place = -1;
        if ((slot.plan.masks[t] >> r & 1) == 0) continue;
        place = going[static_cast<std::size_t>(r)]++;
        row.store(from, t, r,
                  static_cast<std::size_t>(slot.plan.first[r]) + static_cast<std::size_t>(place));
      }
    }
    for (int r = 0; r < shape.ranks; ++r) {
      if (is_dead(*slot.dead, r)) continue;
      shape.at<std::int32_t>(r, slot.told_rows)[shape.rank] = going[static_cast<std::size_t>(r)];
    }
  }

  void receive(int set, const ep_shape& shape, const low_latency_slot& slot,
               const ep_totals& totals) const {
    wait_for_living(shape, slot, flag_kind::rows, totals, sent_[set]);
    // Kept apart from what was told: a rank that is dead may come yet, and tell.
    const auto* const told = shape.at<std::int32_t>(shape.rank, slot.told_rows);
    for (int r = 0; r < shape.ranks; ++r) {
      slot.source_rows[r] = is_dead(*slot.dead, r) ? 0 : told[r];
    }
  }

  driver& on_;
  std::uint64_t sent_[2] = {}, combined_[2] = {};  ///< rounds of each set, counted on the stream
};

}  // namespace

std::unique_ptr<low_latency_steps> make_host_low_latency_steps(driver& on) {
  return std::make_unique<host_low_latency_steps>(on);
}

}  // namespace evmm::ep
