// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/ledger.hpp"

#include <algorithm>
#include <utility>

namespace evmm {

namespace {
constexpr std::size_t k_count = 0, k_bytes = 1, k_requested = 2, k_active_count = 3,
                      k_active_bytes = 4;
}  // namespace

void ledger_account::update() noexcept {
  for (part& one : parts_) {
    std::array<std::int64_t, totals> grown;
    for (std::size_t i = 0; i < totals; ++i) grown[i] = one.current[i] - one.dated[i];
    const lanes change{grown[0], grown[1], grown[2], grown[0], grown[1]};
    for (std::size_t i = 0; i < lane_count; ++i) {
      one.room[i] -= change[i];
      one.shared[i] -= change[i];
    }
    one.dated = one.current;
  }
  // One account of the numbers of blocks, kept with the small ones.
  for (const std::size_t lane : {k_count, k_active_count}) {
    parts_[0].shared[lane] += std::exchange(parts_[1].shared[lane], 0);
  }
}

void ledger_account::set_limits() noexcept {
  for (part& one : parts_) {
    one.limit[k_count] =
        one.current[k_count] + std::min(one.room[k_count], one.room[k_active_count]);
    one.limit[k_bytes] =
        one.current[k_bytes] + std::min(std::min(one.room[k_bytes], one.room[k_active_bytes]),
                                        std::min(one.shared[k_bytes], one.shared[k_active_bytes]));
    one.limit[k_requested] =
        one.current[k_requested] + std::min(one.room[k_requested], one.shared[k_requested]);
  }
  count_limit_ = count_ + std::min(parts_[0].shared[k_count], parts_[0].shared[k_active_count]);
}

bool ledger_account::balance(part& asker) noexcept {
  update();
  part& other = &asker == &parts_[0] ? parts_[1] : parts_[0];
  bool enough = true;
  for (std::size_t i = 0; i < lane_count; ++i) {
    if (i != k_count && i != k_active_count && asker.shared[i] < 0) {
      // Half of what the other has, or what is needed, if that is more.
      const std::int64_t taken =
          std::min(other.shared[i], std::max(-asker.shared[i], other.shared[i] / 2));
      if (taken > 0) {
        asker.shared[i] += taken;
        other.shared[i] -= taken;
      }
    }
    enough = enough && asker.room[i] >= 0 && asker.shared[i] >= 0;
  }
  enough = enough && parts_[0].shared[k_count] >= 0 && parts_[0].shared[k_active_count] >= 0;
  set_limits();
  return enough;
}

void ledger_account::defer(size_class kind, std::size_t bytes, std::size_t requested) noexcept {
  free(kind, bytes, requested);
  update();
  part& own = parts_[static_cast<std::size_t>(kind)];
  const auto size = static_cast<std::int64_t>(bytes);
  ++own.pending_count;
  own.pending_bytes += size;
  own.room[k_active_count] -= 1;
  own.room[k_active_bytes] -= size;
  parts_[0].shared[k_active_count] -= 1;
  own.shared[k_active_bytes] -= size;
  set_limits();
}

void ledger_account::complete(size_class kind, std::size_t bytes) noexcept {
  update();
  part& own = parts_[static_cast<std::size_t>(kind)];
  const auto size = static_cast<std::int64_t>(bytes);
  --own.pending_count;
  own.pending_bytes -= size;
  own.room[k_active_count] += 1;
  own.room[k_active_bytes] += size;
  parts_[0].shared[k_active_count] += 1;
  own.shared[k_active_bytes] += size;
  set_limits();
}

void ledger::add(ledger_account& account) {
  const std::lock_guard lock(guard_);
  accounts_.push_back(&account);
}

void ledger::remove(ledger_account& account) {
  const std::lock_guard lock(guard_);
  std::erase(accounts_, &account);
  add_to(gone_, account);
  account.update();
  for (std::size_t i = 0; i < ledger_account::lane_count; ++i) {
    spare_[all][i] += account.parts_[0].shared[i] + account.parts_[1].shared[i];
    spare_[small][i] += account.parts_[0].room[i];
    spare_[large][i] += account.parts_[1].room[i];
  }
}

void ledger::settle(ledger_account& asker) {
  const std::lock_guard lock(guard_);
  std::array<lanes, levels> taken{};
  std::array<lanes, levels> room{};
  {
    const std::lock_guard mine(asker.guard_);
    asker.update();
    const auto& [first, second] = asker.parts_;
    for (std::size_t lane = 0; lane < ledger_account::lane_count; ++lane) {
      room[all][lane] = first.shared[lane] + second.shared[lane];
      room[small][lane] = first.room[lane];
      room[large][lane] = second.room[lane];
    }
  }
  // First half of what others have, then what is needed and no more: whoever is left without comes
  // here too. A negative room belongs to a thread that is on its way.
  for (const bool half : {true, false}) {
    const auto take = [&](lanes& from, which level) {
      for (std::size_t lane = 0; lane < from.size(); ++lane) {
        const std::int64_t lacking = -(room[level][lane] + taken[level][lane]);
        if (lacking <= 0 || from[lane] <= 0) continue;
        const std::int64_t part = half ? from[lane] / 2 : std::min(from[lane], lacking);
        from[lane] -= part;
        taken[level][lane] += part;
      }
    };
    for (const which level : {all, small, large}) take(spare_[level], level);
    for (ledger_account* other : accounts_) {
      if (other == &asker) continue;
      const std::lock_guard theirs(other->guard_);
      other->update();
      for (auto& part : other->parts_) take(part.shared, all);
      take(other->parts_[0].room, small);
      take(other->parts_[1].room, large);
      other->set_limits();
    }
  }
  const std::lock_guard mine(asker.guard_);
  asker.update();
  auto& [first, second] = asker.parts_;
  for (std::size_t lane = 0; lane < ledger_account::lane_count; ++lane) {
    const auto raise = [&](std::int64_t& now, which level) {
      if (now >= 0) return;
      levels_[level].peak[lane] -= now;
      now = 0;
    };
    first.room[lane] += taken[small][lane];
    second.room[lane] += taken[large][lane];
    raise(first.room[lane], small);
    raise(second.room[lane], large);
    std::int64_t together = first.shared[lane] + second.shared[lane] + taken[all][lane];
    raise(together, all);
    const bool number = lane == k_count || lane == k_active_count;
    second.shared[lane] = number ? 0 : together / 2;
    first.shared[lane] = together - second.shared[lane];
  }
  asker.set_limits();
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
    account->update();
    for (auto& part : account->parts_) part.room = part.shared = {};
    account->set_limits();
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
