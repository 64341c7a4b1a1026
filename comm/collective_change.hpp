// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/collective_observers.hpp"
#include "lib/memory/memory_source.hpp"
#include "lib/memory/observers.hpp"
#include "lib/memory/remap.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/handle_exchange.hpp>
#include <evmm/driver.hpp>
#include <evmm/region.hpp>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// What the ranks of a node handed out in one exchange: by node rank, in the sender's order.
using handed_out = std::vector<std::vector<memory_ptr>>;

/// One collective change of a symmetric region, as the steps that differ between the kinds. Each
/// may throw; empty ones are left out. All ranks fill in the same ones.
struct collective_change {
  region_change what = {};
  uses in_use = {};
  /// Takes this rank's new memory. Nothing is visible yet.
  std::function<void()> prepare = {};
  /// Copies contents out of the old memory: every rank's streams are past it.
  std::function<void()> copy_out = {};
  /// This rank's new memory, for its peers. Left empty, nothing is exchanged.
  std::function<std::vector<const physical_memory*>()> hand_out = {};
  /// Plans what backs which slot, of all parts, from what the peers handed out.
  std::function<void(remap&, const handed_out&)> plan = {};
  /// Copies contents into the new memory, which is mapped.
  std::function<void()> copy_in = {};
  /// Makes it final. May not fail; receives the memory no longer used, in order of the plan.
  std::function<void(std::vector<memory_ptr>)> commit = {};
};

/// What a collective change works on.
struct collective_context {
  bootstrap& ranks;
  driver& on;
  device_id device;  ///< whose default stream `in_use` means
  handle_exchange& exchange;
  const access_rule& access;
  observer_list& observers;
  collective_observer_list& followers;
  std::function<region_part()> own_part;
  std::uint64_t& epoch;
  std::uint64_t& rollbacks;
  change_times& times;
};

/// Writes the time until its end into `spent`.
class stopwatch {
 public:
  explicit stopwatch(std::chrono::nanoseconds& spent) : spent_(spent) {}
  stopwatch(const stopwatch&) = delete;
  stopwatch& operator=(const stopwatch&) = delete;
  ~stopwatch() { spent_ = std::chrono::steady_clock::now() - start_; }

 private:
  std::chrono::nanoseconds& spent_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

/// Runs `step` here and then agrees: all ranks return, or all throw the same error.
void agree_on(bootstrap& ranks, std::string_view name, const std::function<void()>& step);

/// Prepare - agree - quiesce - agree - collective observers down - agree - copy, exchange and map -
/// agree - commit - collective observers up. When any rank fails at any step, every rank puts back
/// what it did, in its own memory alone, brings the collective observers up, and throws the same
/// error. Collective.
void run(const collective_context& context, const collective_change& change);

}  // namespace evmm
