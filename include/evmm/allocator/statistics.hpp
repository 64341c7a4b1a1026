// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>

namespace [[gnu::visibility("default")]] evmm {

/// One quantity over time, as PyTorch counts it.
struct statistic {
  std::int64_t current = 0;
  std::int64_t peak = 0;       ///< highest `current` since construction or reset_peaks()
  std::int64_t allocated = 0;  ///< sum of all increases since construction or reset_totals()
  std::int64_t freed = 0;      ///< sum of all decreases

  void add(std::int64_t amount) noexcept {
    current += amount;
    if (amount > 0) {
      allocated += amount;
      if (current > peak) peak = current;
    } else {
      freed -= amount;
    }
  }
  void reset_peak() noexcept { peak = current; }
  void reset_totals() noexcept { allocated = freed = 0; }
  friend bool operator==(const statistic&, const statistic&) = default;
};

/// The same for all blocks, those of small pools, and those of large pools.
struct pool_statistic {
  statistic all, small_pool, large_pool;

  void reset_peaks() noexcept {
    for (statistic* one : {&all, &small_pool, &large_pool}) one->reset_peak();
  }
  void reset_totals() noexcept {
    for (statistic* one : {&all, &small_pool, &large_pool}) one->reset_totals();
  }
};

enum class pool_id : std::uint64_t;

/// PyTorch's names and meanings (torch.cuda.memory_stats).
struct allocator_statistics {
  pool_statistic allocation;  ///< live blocks
  pool_statistic active;      ///< live blocks and those that wait for other streams
  pool_statistic segment;  ///< pieces of memory taken from the driver; handles, where they expand
  /// Free blocks beside live ones in their segment, where segments do not expand. Counted whenever
  /// statistics() or a reset is called: what comes and goes in between is not in peak and totals.
  pool_statistic inactive_split;
  pool_statistic allocated_bytes, active_bytes, reserved_bytes, inactive_split_bytes;
  pool_statistic requested_bytes;  ///< what callers asked for, before rounding
  /// Of reserved_bytes, by each private pool that is there.
  std::map<pool_id, pool_statistic> reserved_bytes_by_private_pools = {};

  std::int64_t num_alloc_retries = 0;     ///< requests that needed cached memory to be given back
  std::int64_t num_ooms = 0;              ///< requests that failed
  std::int64_t num_oom_rejections = 0;    ///< refused before the driver was asked
  std::int64_t num_sync_all_streams = 0;  ///< waits for everything outstanding
  std::int64_t num_device_alloc = 0;      ///< creations
  std::int64_t num_device_free = 0;       ///< releases
  std::int64_t max_split_size = -1;       ///< bytes; -1 when there is no limit
  statistic oversize_allocations, oversize_segments;

  // Beyond PyTorch's.
  std::int64_t mapped_bytes = 0;      ///< addresses with memory behind them; at most reserved_bytes
  std::int64_t handles_recycled = 0;  ///< handles mapped elsewhere rather than made
  std::int64_t handles_claimed = 0;   ///< handles that were mapped there already: no driver call
  std::int64_t host_tier_bytes = 0;   ///< reserved bytes that lie in host memory
};

}  // namespace evmm
