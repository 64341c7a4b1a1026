// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/log.hpp"

#include <evmm/driver.hpp>
#include <evmm/ep/table.hpp>

#include <memory>
#include <utility>
#include <vector>

namespace evmm::ep {

/// Events of issued gathers, used again.
class event_store {
 public:
  event_store(driver& on, device_id device) : on_(on), device_(device) {}
  event_store(const event_store&) = delete;
  event_store& operator=(const event_store&) = delete;
  ~event_store() {
    for (const native_event event : free_) {
      log_failure("destroying a gather's event", [&] { on_.destroy_event(event); });
    }
  }
  native_event take() {
    if (free_.empty()) return on_.create_event(device_);
    const native_event event = free_.back();
    free_.pop_back();
    return event;
  }
  void put_back(native_event event) { free_.push_back(event); }
  driver& on() const { return on_; }

 private:
  driver& on_;
  device_id device_;
  std::vector<native_event> free_;
};

struct pending_gather::state {
  explicit state(std::shared_ptr<event_store> from)
      : events(std::move(from)), event(events->take()) {}
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() { events->put_back(event); }

  std::shared_ptr<event_store> events;
  native_event event;
};

}  // namespace evmm::ep
