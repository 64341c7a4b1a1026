// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/event_pool.hpp"

#include "lib/support/log.hpp"

#include <utility>

namespace evmm {

event_pool::~event_pool() {
  for (native_event event : idle_) {
    log_failure("destroying an event", [&] { on_->destroy_event(event); });
  }
}

event_pool::lease event_pool::record(native_stream stream) {
  lease taken;
  std::uint64_t order = 0;
  {
    const std::lock_guard lock(guard_);
    order = ++recorded_;
    if (idle_.empty()) {
      idle_.reserve(idle_.capacity() + 1);  // so that giving it back cannot fail
    } else {
      taken = lease(*this, idle_.back());
      idle_.pop_back();
    }
  }
  if (!taken) taken = lease(*this, on_->create_event(device_));
  taken.order_ = order;
  on_->record(taken.get(), stream);
  return taken;
}

event_pool::lease::lease(lease&& other) noexcept
    : from_(std::exchange(other.from_, nullptr)),
      event_(std::exchange(other.event_, nullptr)),
      order_(other.order_) {}

event_pool::lease& event_pool::lease::operator=(lease&& other) noexcept {
  if (this != &other) {
    reset();
    from_ = std::exchange(other.from_, nullptr);
    event_ = std::exchange(other.event_, nullptr);
    order_ = other.order_;
  }
  return *this;
}

void event_pool::lease::reset() noexcept {
  event_pool* const from = std::exchange(from_, nullptr);
  if (from == nullptr) return;
  const native_event event = std::exchange(event_, nullptr);
  const std::lock_guard lock(from->guard_);
  if (from->idle_.size() < from->idle_.capacity()) {
    from->idle_.push_back(event);
  } else {
    log_failure("destroying an event", [&] { from->on_->destroy_event(event); });
  }
}

}  // namespace evmm
