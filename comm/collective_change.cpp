// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"

#include "lib/memory/copier.hpp"

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

/// A longer deadline for the duration of a change.
class patience {
 public:
  patience(bootstrap& ranks, std::chrono::milliseconds more)
      : ranks_(ranks), before_(ranks.timeout()) {
    ranks_.set_timeout(before_ + more);
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

void run(const collective_context& context, const collective_change& change) {
  const std::string kind = to_string(change.what.kind);
  const auto agree = [&](const char* step, const std::function<void()>& body) {
    agree_on(context.ranks, kind + ": " + step, body);
  };
  const patience longer(context.ranks, time_for(change.what.bytes));
  // Destroyed in reverse: mappings are put back before the observers hear that it is off.
  std::optional<announced_change> announced;
  remap swap(context.on, context.access);

  if (change.prepare) agree("prepare", change.prepare);
  agree("quiesce", [&] {
    announced.emplace(context.observers, change.what, context.rollbacks);
    wait_for(context.on, change.in_use);
  });
  if (change.copy_out) agree("copy", change.copy_out);
  agree("map", [&] {
    handed_out shared;
    if (change.hand_out) shared = exchange_handles(context.exchange, change.hand_out());
    change.plan(swap, shared);
    swap.apply();
    if (change.copy_in) change.copy_in();
  });
  change.commit(swap.commit());
  announced->committed(++context.epoch);
}

}  // namespace evmm
