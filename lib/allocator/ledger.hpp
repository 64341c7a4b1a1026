// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/size_rules.hpp"
#include "lib/allocator/spin_lock.hpp"

#include <evmm/allocator/statistics.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// What one arena has handed out, and its share of the room below the peaks.
///
/// A peak over all arenas would have every allocation of every stream write one shared counter.
/// Instead each account holds headroom: by how much it may grow before some peak could be passed.
/// The headrooms of all accounts and the room below the peak are the same amount, always, so peaks
/// are exact. An account that runs out takes from the others, and only when they have none either
/// has the peak been reached: then it is raised. Everything here is under the arena's lock.
class ledger_account {
 public:
  ledger_account(size_class kind, spin_lock& guard) : kind_(kind), guard_(guard) {}

  /// Returns true when headroom has run out: the caller lets go of the arena's lock and calls
  /// ledger::settle before anything else happens.
  [[nodiscard]] bool allocate(std::size_t bytes, std::size_t requested) noexcept {
    const std::int64_t size = as_signed(bytes);
    const std::int64_t asked = as_signed(requested);
    ++total_[0];
    total_[1] += size;
    total_[2] += asked;
    move(current_, 1, size, asked);
    return (take(room_all_, size, asked) | take(room_class_, size, asked)) < 0;
  }
  void free(std::size_t bytes, std::size_t requested) noexcept {
    const std::int64_t size = as_signed(bytes);
    const std::int64_t asked = as_signed(requested);
    move(current_, -1, -size, -asked);
    take(room_all_, -size, -asked, -1);
    take(room_class_, -size, -asked, -1);
  }
  /// A freed block that other streams still use: no longer allocated, still active.
  void defer(std::size_t bytes, std::size_t requested) noexcept;
  void complete(std::size_t bytes) noexcept;

  size_class kind() const noexcept { return kind_; }
  std::int64_t allocated_bytes() const noexcept { return current_[1]; }
  std::int64_t allocated_count() const noexcept { return current_[0]; }

 private:
  friend class ledger;
  /// Allocations, their bytes, bytes asked for; blocks and bytes that are live or pending.
  static constexpr std::size_t lane_count = 5;
  static constexpr std::size_t totals = 3;
  using lanes = std::array<std::int64_t, lane_count>;
  static std::int64_t as_signed(std::size_t n) noexcept { return static_cast<std::int64_t>(n); }
  // Written out lane by lane: a loop over an array of changes stalls on its way to vectors.
  static void move(std::array<std::int64_t, totals>& sums, std::int64_t count, std::int64_t size,
                   std::int64_t asked) noexcept {
    sums[0] += count;
    sums[1] += size;
    sums[2] += asked;
  }
  /// Negative when a lane of `room` has become so.
  static std::int64_t take(lanes& room, std::int64_t size, std::int64_t asked,
                           std::int64_t count = 1) noexcept {
    return (room[0] -= count) | (room[1] -= size) | (room[2] -= asked) | (room[3] -= count) |
           (room[4] -= size);
  }

  std::array<std::int64_t, totals> current_{};
  std::array<std::int64_t, totals> total_{};
  lanes room_all_{};
  lanes room_class_{};
  std::int64_t pending_count_ = 0;
  std::int64_t pending_bytes_ = 0;
  size_class kind_;
  spin_lock& guard_;
};

/// The accounts of an allocator, and its peaks.
/// Threads: any; takes the accounts' locks one at a time, so none may be held.
class ledger {
 public:
  void add(ledger_account& account);
  /// The account's statistics stay in the totals.
  void remove(ledger_account& account);
  void settle(ledger_account& asker);
  void reset_peaks();
  void reset_totals();
  /// Fills in allocation, active, allocated_bytes, active_bytes and requested_bytes.
  void fill(allocator_statistics& into) const;
  /// Most bytes ever live or pending at one time since the peaks were reset.
  std::int64_t peak_active_bytes() const;
  std::int64_t active_bytes() const;

 private:
  using lanes = ledger_account::lanes;
  struct level {
    lanes peak{};
    lanes allocated_before{};  ///< totals at the last reset
    lanes freed_before{};
  };
  struct sums {
    lanes current{};
    lanes total{};
  };
  enum which : std::size_t { all, small, large, levels };

  static void add_to(sums& to, const ledger_account& account);
  std::array<sums, levels> add_up() const;

  mutable std::mutex guard_;
  std::vector<ledger_account*> accounts_;
  std::array<level, levels> levels_{};
  std::array<sums, levels> gone_{};    ///< of accounts that were removed
  std::array<lanes, levels> spare_{};  ///< their headroom
};

}  // namespace evmm
