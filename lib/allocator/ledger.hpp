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

/// What the arenas of one stream and pool have handed out, their share of the room below the peaks,
/// and their lock.
///
/// A peak over all streams would have every allocation write one shared counter. Instead each
/// account holds headroom: by how much it may grow before some peak could be passed. The
/// headrooms of all accounts and the room below the peak are the same amount, always, so peaks are
/// exact. An account that runs out takes from the others, and only when they have none either has
/// the peak been reached: then it is raised. Everything here is under guard().
class ledger_account {
 public:
  spin_lock& guard() const noexcept { return guard_; }

  /// Returns true when headroom has run out: the caller lets go of the lock and calls
  /// ledger::settle before anything else happens.
  [[nodiscard]] bool allocate(size_class kind, std::size_t bytes, std::size_t requested) noexcept {
    const std::int64_t size = as_signed(bytes);
    const std::int64_t asked = as_signed(requested);
    part& own = parts_[static_cast<std::size_t>(kind)];
    move(own.total, 1, size, asked);
    move(own.current, 1, size, asked);
    return (take(room_, size, asked) | take(own.room, size, asked)) < 0;
  }
  void free(size_class kind, std::size_t bytes, std::size_t requested) noexcept {
    const std::int64_t size = as_signed(bytes);
    const std::int64_t asked = as_signed(requested);
    part& own = parts_[static_cast<std::size_t>(kind)];
    move(own.current, -1, -size, -asked);
    take(room_, -size, -asked, -1);
    take(own.room, -size, -asked, -1);
  }
  /// A freed block that other streams still use: no longer allocated, still active.
  void defer(size_class kind, std::size_t bytes, std::size_t requested) noexcept;
  void complete(size_class kind, std::size_t bytes) noexcept;

  std::int64_t allocated_bytes(size_class kind) const noexcept {
    return parts_[static_cast<std::size_t>(kind)].current[1];
  }
  std::int64_t allocated_count(size_class kind) const noexcept {
    return parts_[static_cast<std::size_t>(kind)].current[0];
  }

 private:
  friend class ledger;
  /// Allocations, their bytes, bytes asked for; blocks and bytes that are live or pending.
  static constexpr std::size_t lane_count = 5;
  static constexpr std::size_t totals = 3;
  using lanes = std::array<std::int64_t, lane_count>;
  /// Of small or of large blocks.
  struct part {
    std::array<std::int64_t, totals> current{};
    std::array<std::int64_t, totals> total{};
    lanes room{};
    std::int64_t pending_count = 0;
    std::int64_t pending_bytes = 0;
  };

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

  mutable spin_lock guard_;
  lanes room_{};  ///< below the peaks of all blocks
  std::array<part, 2> parts_{};
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

  static void add_to(std::array<sums, levels>& to, const ledger_account& account);
  std::array<sums, levels> add_up() const;

  mutable std::mutex guard_;
  std::vector<ledger_account*> accounts_;
  std::array<level, levels> levels_{};
  std::array<sums, levels> gone_{};    ///< of accounts that were removed
  std::array<lanes, levels> spare_{};  ///< their headroom
};

}  // namespace evmm
