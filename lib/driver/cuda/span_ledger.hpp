// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <iterator>
#include <map>
#include <mutex>
#include <optional>

namespace evmm {

/// Pieces of memory of one kind that a driver gave, by where they begin: what vmm_ledger is for
/// handles. Pure bookkeeping; thread-safe.
class span_ledger {
 public:
  void add(address at, std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    pieces_[at] = bytes;
    bytes_ += bytes;
  }
  /// Takes a piece out, so that no other thread can; nullopt when none begins there.
  std::optional<std::size_t> remove(address at) {
    const std::lock_guard lock(mutex_);
    const auto found = pieces_.find(at);
    if (found == pieces_.end()) return std::nullopt;
    const std::size_t bytes = found->second;
    pieces_.erase(found);
    bytes_ -= bytes;
    return bytes;
  }
  bool overlaps(address at, std::size_t bytes) const {
    const std::lock_guard lock(mutex_);
    const auto past = pieces_.lower_bound(at + bytes);
    return past != pieces_.begin() && std::prev(past)->first + std::prev(past)->second > at;
  }
  std::size_t count() const {
    const std::lock_guard lock(mutex_);
    return pieces_.size();
  }
  std::size_t bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  mutable std::mutex mutex_;
  std::map<address, std::size_t> pieces_;
  std::size_t bytes_ = 0;
};

}  // namespace evmm
