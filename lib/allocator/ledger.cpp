// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/ledger.hpp"

#include <algorithm>
#include <utility>

namespace evmm {

namespace {
constexpr std::size_t k_count = 0, k_bytes = 1, k_requested = 2, k_active_count = 3,
                      k_active_bytes = 4;
}  // namespace

void ledger_account::defer(size_class kind, std::size_t bytes, std::size_t requested) noexcept {
  part& own = parts_[static_cast<std::size_t>(kind)];
  const std::int64_t change[totals] = {1, as_signed(bytes), as_signed(requested)};
  for (std::size_t i = 0; i < totals; ++i) {
    own.current[i] -= change[i];
    own.room[i] += change[i];
    room_[i] += change[i];
  }
  ++own.pending_count;
  own.pending_bytes += as_signed(bytes);
}

void ledger_account::complete(size_class kind, std::size_t bytes) noexcept {
  part& own = parts_[static_cast<std::size_t>(kind)];
  --own.pending_count;
  own.pending_bytes -= as_signed(bytes);
  for (lanes* room : {&room_, &own.room}) {
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
  add_to(gone_, account);
  for (std::size_t i = 0; i < ledger_account::lane_count; ++i) {
    spare_[all][i] += account.room_[i];
    spare_[small][i] += account.parts_[0].room[i];
    spare_[large][i] += account.parts_[1].room[i];
  }
}

void ledger::settle(ledger_account& asker) {
  const std::lock_guard lock(guard_);
  const auto rooms = [](ledger_account& of) {
    return std::array<lanes*, levels>{&of.room_, &of.parts_[0].room, &of.parts_[1].room};
  };
  std::array<lanes, levels> taken = std::exchange(spare_, {});
  std::array<lanes, levels> had;
  {
    const std::lock_guard mine(asker.guard_);
    for (std::size_t i = 0; i < levels; ++i) had[i] = *rooms(asker)[i];
  }
  const auto lacks = [&] {
    for (std::size_t i = 0; i < levels; ++i) {
      for (std::size_t lane = 0; lane < ledger_account::lane_count; ++lane) {
        if (had[i][lane] + taken[i][lane] < 0) return true;
      }
    }
    return false;
  };
  // First half of what the others have, then, when that is not enough, the rest.
  for (const bool half : {true, false}) {
    for (ledger_account* other : accounts_) {
      if (other == &asker) continue;
      const std::lock_guard theirs(other->guard_);
      for (std::size_t i = 0; i < levels; ++i) {
        lanes& from = *rooms(*other)[i];
        for (std::size_t lane = 0; lane < ledger_account::lane_count; ++lane) {
          // A negative room belongs to a thread that is on its way here: it is a debt to take over
          // only when there is no other room.
          const std::int64_t part = half ? std::max<std::int64_t>(from[lane], 0) / 2 : from[lane];
          from[lane] -= part;
          taken[i][lane] += part;
        }
      }
    }
    if (!lacks()) break;
  }
  const std::lock_guard mine(asker.guard_);
  for (std::size_t i = 0; i < levels; ++i) {
    lanes& room = *rooms(asker)[i];
    for (std::size_t lane = 0; lane < ledger_account::lane_count; ++lane) {
      room[lane] += taken[i][lane];
      if (room[lane] < 0) {
        levels_[i].peak[lane] -= room[lane];
        room[lane] = 0;
      }
    }
  }
}

void ledger::add_to(std::array<sums, levels>& to, const ledger_account& account) {
  const auto add = [](lanes& into, const std::array<std::int64_t, ledger_account::totals>& from) {
    for (std::size_t i = 0; i < from.size(); ++i) into[i] += from[i];
    into[k_active_count] += from[k_count];
    into[k_active_bytes] += from[k_bytes];
  };
  for (const auto& [level, kind] : {std::pair{small, 0}, std::pair{large, 1}}) {
    const ledger_account::part& part = account.parts_[static_cast<std::size_t>(kind)];
    for (sums* into : {&to[all], &to[level]}) {
      add(into->current, part.current);
      add(into->total, part.total);
      into->current[k_active_count] += part.pending_count;
      into->current[k_active_bytes] += part.pending_bytes;
    }
  }
}

std::array<ledger::sums, ledger::levels> ledger::add_up() const {
  std::array<sums, levels> all_sums = gone_;
  for (ledger_account* account : accounts_) {
    const std::lock_guard theirs(account->guard_);
    add_to(all_sums, *account);
  }
  return all_sums;
}

void ledger::reset_peaks() {
  const std::lock_guard lock(guard_);
  for (ledger_account* account : accounts_) {
    const std::lock_guard theirs(account->guard_);
    account->room_ = {};
    for (auto& part : account->parts_) part.room = {};
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
