// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"

#include "lib/memory/copier.hpp"

#include <algorithm>
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <utility>

namespace evmm {

namespace {

handed_out exchange_handles(handle_exchange& exchange,
                            const std::vector<const physical_memory*>& mine) {
  handed_out shared;
  for (std::vector<physical_memory>& of_peer : exchange.exchange(mine)) {
    auto& list = shared.emplace_back();
    for (physical_memory& memory : of_peer) {
      list.push_back(std::make_shared<physical_memory>(std::move(memory)));
    }
  }
  return shared;
}

/// Time that a change of this size may honestly take on the slowest rank, on top of what ranks
/// wait for each other: host memory comes at 2.6-4.1 GiB/s and is then mapped and copied.
std::chrono::milliseconds time_for(std::size_t bytes) {
  constexpr std::chrono::milliseconds a_gibibyte{1000};
  return a_gibibyte * (1 + (bytes >> 30));
}

/// What a bootstrap takes at most.
constexpr std::chrono::hours k_longest_timeout{7 * 24};

/// A longer deadline for the duration of a change.
class patience {
 public:
  patience(bootstrap& ranks, std::chrono::milliseconds more)
      : ranks_(ranks), before_(ranks.timeout()) {
    ranks_.set_timeout(std::min<std::chrono::milliseconds>(before_ + more, k_longest_timeout));
  }
  patience(const patience&) = delete;
  patience& operator=(const patience&) = delete;
  ~patience() { ranks_.set_timeout(before_); }

 private:
  bootstrap& ranks_;
  std::chrono::milliseconds before_;
};

}  // namespace

void agree_on(bootstrap& ranks, std::string_view name, const std::function<void()>& step) {
  std::exception_ptr failure;
  try {
    if (step) step();
  } catch (...) {
    failure = std::current_exception();
  }
  ranks.agree(failure, name);
}

namespace {

/// All but bringing the collective observers up. What it made is put back when it throws.
void run_steps(const collective_context& context, const collective_change& change,
               followed_change& followed) {
  const std::string kind = to_string(change.what.kind);
  change_times& times = context.times;
  const auto agree = [&](const char* step, std::chrono::nanoseconds& spent,
                         const std::function<void()>& body) {
    const stopwatch clock(spent);
    agree_on(context.ranks, kind + ": " + step, body);
  };
  // Destroyed in reverse: mappings are put back before the observers hear that it is off.
  std::optional<announced_change> announced;
  remap swap(context.on, context.access);

  if (change.prepare) agree("prepare", times.prepare, change.prepare);
  agree("quiesce", times.quiesce, [&] {
    followed.ask();
    announced.emplace(context.observers, change.what, context.rollbacks);
    wait_for(context.on, context.device, change.in_use);
  });
  if (followed.followed()) agree("take down", times.take_down, [&] { followed.take_down(); });
  if (change.copy_out) agree("copy", times.copy, change.copy_out);
  agree("map", times.map, [&] {
    handed_out shared;
    if (change.hand_out) shared = exchange_handles(context.exchange, change.hand_out());
    change.plan(swap, shared);
    swap.apply();
    if (change.copy_in) change.copy_in();
  });
  change.commit(swap.commit());
  announced->committed(++context.epoch);
  followed.committed(context.epoch);
}

}  // namespace

void run(const collective_context& context, const collective_change& change) {
  const patience longer(context.ranks, time_for(change.what.bytes));
  followed_change followed(context.followers, change.what);
  const auto bring_up = [&] {
    const stopwatch clock(context.times.bring_up);
    followed.bring_up(context.own_part());
  };
  try {
    run_steps(context, change, followed);
  } catch (...) {
    bring_up();
    throw;
  }
  bring_up();
}

}  // namespace evmm
