// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/caching_allocator.hpp>

#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

class arena;

/// A pool of an allocator. Under the allocator's slow lock, except what is const from construction.
struct pool_record {
  pool_id id{};
  pool_options options = {};
  int users = 1;
  int captures = 0;       ///< captures under way that allocate here
  bool captured = false;  ///< a graph may replay on its addresses: they stay backed as they are
  std::vector<arena*> arenas = {};
  pool_statistic reserved_bytes = {};

  /// Whether its free memory may serve others.
  bool may_give() const noexcept { return captures == 0 && (!captured || users == 0); }
  bool in_tier(tier kind) const noexcept {
    for (const tier allowed : options.tiers) {
      if (allowed == kind) return true;
    }
    return false;
  }
};

}  // namespace evmm
