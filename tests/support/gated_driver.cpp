// SPDX-License-Identifier: Apache-2.0
#include "tests/support/gated_driver.hpp"

#include <algorithm>

namespace evmm::test {

bool gated_driver::close(native_stream stream) {
  const std::lock_guard lock(mutex_);
  const bool held = std::any_of(gates_.begin(), gates_.end(),
                                [&](const auto& each) { return each.second.stream == stream; });
  if (held || synchronising_ != 0) return false;
  gates_[++closings_] = {stream, std::make_unique<stream_gate>(*this, stream)};
  streams_[stream].insert(closings_);
  return true;
}

void gated_driver::open_all() {
  const std::lock_guard lock(mutex_);
  gates_.clear();
  streams_.clear();
}

void gated_driver::open_oldest() {
  const std::lock_guard lock(mutex_);
  if (!gates_.empty()) gates_.erase(gates_.begin());
}

std::size_t gated_driver::closed() const {
  const std::lock_guard lock(mutex_);
  return gates_.size();
}

gate_set gated_driver::still_closed_locked(const gate_set& gates) const {
  gate_set closed;
  for (const auto number : gates) {
    if (gates_.contains(number)) closed.insert(number);
  }
  return closed;
}

gate_set gated_driver::still_closed(const gate_set& gates) const {
  const std::lock_guard lock(mutex_);
  return still_closed_locked(gates);
}

gate_set gated_driver::behind(native_stream stream) const {
  const std::lock_guard lock(mutex_);
  const auto known = streams_.find(stream);
  return known == streams_.end() ? gate_set{} : still_closed_locked(known->second);
}

void gated_driver::record(native_event event, native_stream stream) {
  const std::lock_guard lock(mutex_);
  forwarding_driver::record(event, stream);
  const auto known = streams_.find(stream);
  if (known == streams_.end()) {
    events_.erase(event);
  } else {
    events_[event] = still_closed_locked(known->second);
  }
}

void gated_driver::wait(native_stream stream, native_event event) {
  const std::lock_guard lock(mutex_);
  forwarding_driver::wait(stream, event);
  const auto known = events_.find(event);
  if (known == events_.end()) return;
  const gate_set closed = still_closed_locked(known->second);
  if (!closed.empty()) streams_[stream].insert(closed.begin(), closed.end());
}

template <class Wait>
void gated_driver::opened_for(Wait&& wait) {
  {
    const std::lock_guard lock(mutex_);
    ++synchronising_;
    gates_.clear();
    streams_.clear();
  }
  struct at_end {
    gated_driver& self;
    ~at_end() {
      const std::lock_guard lock(self.mutex_);
      --self.synchronising_;
    }
  } const done{*this};
  wait();
}

void gated_driver::synchronize(native_stream stream) {
  opened_for([&] { forwarding_driver::synchronize(stream); });
}

void gated_driver::synchronize(native_event event) {
  opened_for([&] { forwarding_driver::synchronize(event); });
}

}  // namespace evmm::test
