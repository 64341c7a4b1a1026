// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"

#include <condition_variable>
#include <mutex>

namespace evmm::test {

struct stream_gate::state {
  std::mutex mutex;
  std::condition_variable changed;
  bool reached = false;
  bool open = false;
};

stream_gate::stream_gate(driver& on, native_stream stream) : state_(std::make_shared<state>()) {
  // The stream shares the state: it may still be on its way out when the gate is destroyed.
  on.launch(stream, [shared = state_] {
    std::unique_lock lock(shared->mutex);
    shared->reached = true;
    shared->changed.notify_all();
    shared->changed.wait(lock, [&] { return shared->open; });
  });
}

stream_gate::~stream_gate() {
  open();
}

void stream_gate::open() {
  const std::lock_guard lock(state_->mutex);
  state_->open = true;
  state_->changed.notify_all();
}

void stream_gate::wait_reached() {
  std::unique_lock lock(state_->mutex);
  state_->changed.wait(lock, [&] { return state_->reached; });
}

}  // namespace evmm::test
