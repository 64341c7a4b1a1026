// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/ledger.hpp"

#include <algorithm>
#include <utility>

namespace evmm {

namespace {
constexpr std::size_t k_count = 0, k_bytes = 1, k_requested = 2, k_active_count = 3,
                      k_active_bytes = 4;
}  // namespace

void ledger_account::defer(std::size_t bytes, std::size_t requested) noexcept {
  const lanes change{1, as_signed(bytes), as_signed(requested), 0, 0};
  for (std::size_t i = 0; i < totals; ++i) {
    current_[i] -= change[i];
    room_all_[i] += change[i];
    room_class_[i] += change[i];
  }
  ++pending_count_;
  pending_bytes_ += as_signed(bytes);
}

void ledger_account::complete(std::size_t bytes) noexcept {
  --pending_count_;
  pending_bytes_ -= as_signed(bytes);
  for (lanes* room : {&room_all_, &room_class_}) {
    (*room)[k_active_count] += 1;
    (*room)[k_active_bytes] += as_signed(bytes);
  }
}

void ledger::add(ledger_account& account) {
  const std::lock_guard lock(guard_);
  accounts_.push_back(&account);
}

void ledger::remove(ledger_account& account) {
  const std::lock_guard lock(guard_);
  std::erase(accounts_, &account);
  add_to(gone_[all], account);
  add_to(gone_[account.kind_ == size_class::small ? small : large], account);
  for (std::size_t i = 0; i < ledger_account::lane_count; ++i) {
    spare_[all][i] += account.room_all_[i];
    spare_[account.kind_ == size_class::small ? small : large][i] += account.room_class_[i];
  }
}

void ledger::settle(ledger_account& asker) {
  const std::lock_guard lock(guard_);
  const which own = asker.kind_ == size_class::small ? small : large;
  lanes taken_all = std::exchange(spare_[all], {});
  lanes taken_class = std::exchange(spare_[own], {});
  const auto lacks = [&](const lanes& room, const lanes& taken) {
    for (std::size_t i = 0; i < room.size(); ++i) {
      if (room[i] + taken[i] < 0) return true;
    }
    return false;
  };
  lanes room_all;
  lanes room_class;
  {
    const std::lock_guard mine(asker.guard_);
    room_all = asker.room_all_;
    room_class = asker.room_class_;
  }
  // First half of what the others have, then, when that is not enough, the rest.
  for (const int keep : {2, 1}) {
    for (ledger_account* other : accounts_) {
      if (other == &asker) continue;
      const std::lock_guard theirs(other->guard_);
      const auto take = [&](lanes& from, lanes& to) {
        for (std::size_t i = 0; i < from.size(); ++i) {
          // A negative room belongs to a thread that is on its way here: it is a debt to take over
          // only when there is no other room.
          const std::int64_t part = keep == 2 ? std::max<std::int64_t>(from[i], 0) / 2 : from[i];
          from[i] -= part;
          to[i] += part;
        }
      };
      take(other->room_all_, taken_all);
      if (other->kind_ == asker.kind_) take(other->room_class_, taken_class);
    }
    if (!lacks(room_all, taken_all) && !lacks(room_class, taken_class)) break;
  }
  const std::lock_guard mine(asker.guard_);
  const auto give = [](lanes& room, const lanes& taken, lanes& peak) {
    for (std::size_t i = 0; i < room.size(); ++i) {
      room[i] += taken[i];
      if (room[i] < 0) {
        peak[i] -= room[i];
        room[i] = 0;
      }
    }
  };
  give(asker.room_all_, taken_all, levels_[all].peak);
  give(asker.room_class_, taken_class, levels_[own].peak);
}

void ledger::add_to(sums& to, const ledger_account& account) {
  const auto active = [](lanes& into,
                         const std::array<std::int64_t, ledger_account::totals>& from) {
    for (std::size_t i = 0; i < from.size(); ++i) into[i] += from[i];
    into[k_active_count] += from[k_count];
    into[k_active_bytes] += from[k_bytes];
  };
  active(to.current, account.current_);
  active(to.total, account.total_);
  to.current[k_active_count] += account.pending_count_;
  to.current[k_active_bytes] += account.pending_bytes_;
}

std::array<ledger::sums, ledger::levels> ledger::add_up() const {
  std::array<sums, levels> all_sums = gone_;
  for (ledger_account* account : accounts_) {
    const std::lock_guard theirs(account->guard_);
    add_to(all_sums[all], *account);
    add_to(all_sums[account->kind_ == size_class::small ? small : large], *account);
  }
  return all_sums;
}

void ledger::reset_peaks() {
  const std::lock_guard lock(guard_);
  for (ledger_account* account : accounts_) {
    const std::lock_guard theirs(account->guard_);
    account->room_all_ = {};
    account->room_class_ = {};
  }
  spare_ = {};
  const auto now = add_up();
  for (std::size_t i = 0; i < levels; ++i) levels_[i].peak = now[i].current;
}

void ledger::reset_totals() {
  const std::lock_guard lock(guard_);
  const auto now = add_up();
  for (std::size_t i = 0; i < levels; ++i) {
    levels_[i].allocated_before = now[i].total;
    for (std::size_t lane = 0; lane < ledger_account::lane_count; ++lane) {
      levels_[i].freed_before[lane] = now[i].total[lane] - now[i].current[lane];
    }
  }
}

void ledger::fill(allocator_statistics& into) const {
  const std::lock_guard lock(guard_);
  const auto now = add_up();
  const auto put = [&](pool_statistic& to, std::size_t lane) {
    statistic* const parts[levels] = {&to.all, &to.small_pool, &to.large_pool};
    for (std::size_t i = 0; i < levels; ++i) {
      const std::int64_t current = now[i].current[lane];
      const std::int64_t total = now[i].total[lane];
      *parts[i] = {.current = current,
                   .peak = std::max(levels_[i].peak[lane], current),
                   .allocated = total - levels_[i].allocated_before[lane],
                   .freed = total - current - levels_[i].freed_before[lane]};
    }
  };
  put(into.allocation, k_count);
  put(into.allocated_bytes, k_bytes);
  put(into.requested_bytes, k_requested);
  put(into.active, k_active_count);
  put(into.active_bytes, k_active_bytes);
}

std::int64_t ledger::peak_active_bytes() const {
  const std::lock_guard lock(guard_);
  return levels_[all].peak[k_active_bytes];
}

std::int64_t ledger::active_bytes() const {
  const std::lock_guard lock(guard_);
  return add_up()[all].current[k_active_bytes];
}

}  // namespace evmm
