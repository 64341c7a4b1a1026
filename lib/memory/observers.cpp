// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/observers.hpp"

#include "lib/support/log.hpp"

#include <utility>

namespace evmm {

const char* to_string(change_kind kind) noexcept {
  switch (kind) {
    case change_kind::grow:
      return "grow";
    case change_kind::shrink:
      return "shrink";
    case change_kind::migrate:
      return "migrate";
    case change_kind::discard:
      return "discard";
    case change_kind::restore:
      return "restore";
    case change_kind::compact:
      return "compact";
  }
  return "change";
}

observer_subscription observer_list::add(region_observer observer) {
  auto kept = std::make_shared<region_observer>(std::move(observer));
  observers_.push_back(kept);
  return kept;
}

std::vector<std::shared_ptr<region_observer>> observer_list::current() {
  std::erase_if(observers_, [](const auto& observer) { return observer.expired(); });
  std::vector<std::shared_ptr<region_observer>> alive;
  for (const auto& observer : observers_) {
    if (auto held = observer.lock()) alive.push_back(std::move(held));
  }
  return alive;
}

announced_change::announced_change(observer_list& observers, const region_change& change,
                                   std::uint64_t& rollbacks)
    : told_(observers.current()), change_(change), rollbacks_(rollbacks) {
  for (std::size_t i = 0; i < told_.size(); ++i) {
    try {
      if (told_[i]->before_change) told_[i]->before_change(change_);
    } catch (...) {
      tell_after(i);
      throw;
    }
  }
}

announced_change::~announced_change() {
  tell_after(told_.size());
}

void announced_change::committed(std::uint64_t epoch) noexcept {
  change_.committed = true;
  change_.epoch = epoch;
}

void announced_change::tell_after(std::size_t count) noexcept {
  if (!change_.committed) ++rollbacks_;
  for (std::size_t i = 0; i < count; ++i) {
    if (!told_[i]->after_change) continue;
    log_failure("an observer after a change", [&] { told_[i]->after_change(change_); });
  }
}

}  // namespace evmm
