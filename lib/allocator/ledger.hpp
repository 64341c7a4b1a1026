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
/// account holds room: by how much it may grow before some peak could be passed. The rooms of all
/// accounts and the room below the peak are the same amount, always, so peaks are exact. An account
/// that runs out takes from the others, and only when they have none either has the peak been
/// reached: then it is raised. Everything here is under guard().
///
/// The hot path only moves `current` and compares it with `limit`, where the first room ends; the
/// rooms themselves are brought up to date when a limit is reached.
class alignas(128) ledger_account {
 public:
  spin_lock& guard() const noexcept { return guard_; }

  /// Returns true when room has run out: the caller lets go of the lock and calls ledger::settle
  /// before anything else happens.
  [[nodiscard]] bool allocate(size_class kind, std::size_t bytes, std::size_t requested) noexcept {
    part& own = parts_[static_cast<std::size_t>(kind)];
    const auto size = static_cast<std::int64_t>(bytes);
    const auto asked = static_cast<std::int64_t>(requested);
    own.total[0] += 1;
    own.total[1] += size;
    own.total[2] += asked;
    const std::int64_t over =
        (own.limit[0] - (own.current[0] += 1)) | (own.limit[1] - (own.current[1] += size)) |
        (own.limit[2] - (own.current[2] += asked)) | (count_limit_ - ++count_);
    return over < 0 && !balance(own);
  }
  void free(size_class kind, std::size_t bytes, std::size_t requested) noexcept {
    part& own = parts_[static_cast<std::size_t>(kind)];
    own.current[0] -= 1;
    own.current[1] -= static_cast<std::int64_t>(bytes);
    own.current[2] -= static_cast<std::int64_t>(requested);
    --count_;
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
    std::array<std::int64_t, totals> limit{};
    std::array<std::int64_t, totals> total{};
    std::array<std::int64_t, totals> dated{};  ///< `current` when the rooms were brought up to date
    lanes room{};                              ///< below the peaks of blocks of this class
    lanes shared{};                            ///< below the peaks of all blocks
    std::int64_t pending_count = 0;
    std::int64_t pending_bytes = 0;
  };

  /// Brings the rooms up to date.
  void update() noexcept;
  /// Sets the limits by the rooms, which are up to date.
  void set_limits() noexcept;
  /// Shares the room that both classes have below the peaks of all blocks. False when that is not
  /// enough.
  [[gnu::noinline]] bool balance(part& asker) noexcept;

  mutable spin_lock guard_;
  // Numbers of blocks are shared between the classes at once: programs sit right at that peak.
  std::int64_t count_ = 0;
  std::int64_t count_limit_ = 0;
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
