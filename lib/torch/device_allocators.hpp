// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/fork_guard.hpp"

#include <evmm/allocator/caching_allocator.hpp>

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

namespace evmm::torch {

/// Which tiers serve a request (evmm_torch_tiers).
enum class tier_choice : std::uint8_t { device_then_host, host_only };

/// One device's allocator, and the pools of it that PyTorch knows.
class device_allocator {
 public:
  device_allocator(std::shared_ptr<driver> on, device_id device, const allocator_options& options)
      : allocator(std::move(on), device, options) {}

  /// PyTorch's pools, which are for graph captures.
  void begin(const pool_number& name, std::function<bool(native_stream)> filter);
  void end(const pool_number& name);
  void release(const pool_number& name);

  /// PyTorch's name of a pool, also of one that is gone. Pools that it did not name have one number
  /// twice, which no name of PyTorch's has.
  pool_number name_of(pool_id pool) const;
  /// With PyTorch's names of pools.
  allocator_snapshot snapshot() const;

  /// The calling thread's allocations go to these tiers until the end.
  void begin(tier_choice tiers);
  void end(tier_choice tiers);
  /// Gives back what is free in the pool of these tiers.
  void empty(tier_choice tiers);

  caching_allocator allocator;
  const fork_guard process;

 private:
  struct graph_pool {
    pool_id its{};
    int users = 0;
  };
  struct tier_pool {
    std::optional<pool_id> its;  ///< made at first use
    int begun = 0;               ///< in all threads; routed to while there is one
  };
  static std::vector<std::pair<const device_allocator*, tier_choice>>& begun_tiers();
  std::optional<tier_choice> innermost() const;
  bool captured(native_stream stream) const;
  tier_pool& pool_of(tier_choice tiers) noexcept;
  graph_pool& find(const pool_number& name, const char* what);
  void drop_user(std::map<pool_number, graph_pool>::iterator of);

  mutable std::mutex guard_;
  std::map<pool_number, graph_pool> graph_pools_;
  std::map<pool_id, pool_number> names_;  ///< of all that ever were: the history may have them
  std::array<tier_pool, 2> tier_pools_;
  std::atomic<int> captures_ = 0;  ///< begun and not ended, of all graphs
};

/// The allocators of a process.
///
/// Threads: every member from any thread; one that is made already is found without a lock.
/// Never destroyed: PyTorch frees tensors as late as it likes.
class device_allocators {
 public:
  static device_allocators& all();

  /// Made at its first use. Throws invalid_argument for a device that does not exist.
  device_allocator& of(int device);
  /// Null when it was not made.
  device_allocator* made(int device) const noexcept;
  /// The one that `at` is a live allocation of, or null.
  device_allocator* owner(const void* at) const noexcept;
  void for_each_made(const std::function<void(device_allocator&)>& visit) const;

  void configure(std::string_view text);
  /// Of those that are made, and of those to come.
  void record_history(const history_options& options);

 private:
  device_allocators() = default;
  allocator_options options_for_new() const;

  static constexpr int k_most_devices = 128;
  std::array<std::atomic<device_allocator*>, k_most_devices> made_ = {};
  std::atomic<int> end_ = 0;  ///< beyond the highest that was made
  std::mutex guard_;
  std::optional<allocator_options> options_;  ///< the environment's unless changed
  std::optional<history_options> history_;
};

}  // namespace evmm::torch
