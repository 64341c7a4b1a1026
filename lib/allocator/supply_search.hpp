// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/memory_supply.hpp"

#include <algorithm>
#include <cstddef>
#include <mutex>
#include <utility>
#include <vector>

namespace evmm {

/// One request for memory: which arenas are locked, which handles are free, where it goes.
struct memory_supply::search {
  arena& needy;
  std::size_t bytes;
  bool may_wait;
  std::vector<std::unique_lock<spin_lock>> locks = {};
  std::vector<std::pair<arena*, giving>> asked = {};
  std::vector<handle_record*> takable = {};  ///< best to take first
  expandable_range* range = nullptr;
  address at = 0;
  block* run = nullptr;  ///< where that lies

  ~search() {
    for (handle_record* handle : takable) handle->giver = nullptr;
  }
  /// The two arenas of a stream share a lock.
  bool has_locked(const spin_lock& guard) const noexcept {
    return &guard == &needy.guard() ||
           std::any_of(locks.begin(), locks.end(),
                       [&](const auto& held) { return held.mutex() == &guard; });
  }
  bool wants(const span_record& span) const noexcept {
    return &span.in == range && span.at() < at + bytes && span.end() > at;
  }
};

}  // namespace evmm
