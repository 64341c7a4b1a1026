// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_observers.hpp"

#include "lib/support/log.hpp"

#include <algorithm>
#include <utility>

namespace evmm {

observer_subscription collective_observer_list::add(collective_observer observer) {
  auto kept = std::make_shared<collective_observer>(std::move(observer));
  entries_.push_back({++added_, kept});
  return kept;
}

std::vector<std::shared_ptr<collective_observer>> collective_observer_list::current() {
  std::erase_if(entries_, [](const entry& each) { return each.observer.expired(); });
  std::vector<std::shared_ptr<collective_observer>> alive;
  for (const entry& each : entries_) {
    if (auto held = each.observer.lock()) alive.push_back(std::move(held));
  }
  return alive;
}

std::uint64_t collective_observer_list::signature() {
  std::uint64_t hash = 0xcbf29ce484222325;  // FNV-1a
  for (const entry& each : entries_) {
    if (!each.observer.expired()) hash = (hash ^ each.number) * 0x100000001b3;
  }
  return hash;
}

bool collective_observer_list::concerned(const region_change& change) {
  const auto all = current();
  return std::any_of(all.begin(), all.end(), [&](const auto& observer) {
    return !observer->concerns || observer->concerns(change);
  });
}

void collective_observer_list::gone() noexcept {
  for (const auto& observer : current()) {
    if (observer->gone) log_failure("an observer of a region that goes", observer->gone);
  }
  entries_.clear();
}

followed_change::followed_change(collective_observer_list& observers, const region_change& change)
    : observers_(observers.current()), change_(change) {}

void followed_change::ask() const {
  for (const auto& observer : observers_) {
    if (observer->before_change) observer->before_change(change_);
  }
}

void followed_change::take_down() {
  taken_down_ = true;
  for (const auto& observer : observers_) {
    if (observer->take_down) observer->take_down(change_);
  }
}

void followed_change::committed(std::uint64_t epoch) noexcept {
  change_.committed = true;
  change_.epoch = epoch;
}

void followed_change::bring_up(const region_part& part) noexcept {
  if (!taken_down_) return;
  for (const auto& observer : observers_) {
    if (!observer->bring_up) continue;
    log_failure("a collective observer after a change", [&] { observer->bring_up(change_, part); });
  }
}

}  // namespace evmm
