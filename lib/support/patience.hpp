// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <chrono>
#include <thread>

#include <sched.h>

namespace evmm {

/// Waiting for other threads or processes by looking again and again: gives the core away at once,
/// as they may need it to get there, and lets it rest when the wait turns out long.
class patience {
 public:
  void spend() {
    if (clock::now() - since_ < std::chrono::milliseconds(5)) {
      ::sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
  /// Something came: what comes next is likely near.
  void renew() { since_ = clock::now(); }

 private:
  using clock = std::chrono::steady_clock;
  clock::time_point since_ = clock::now();
};

}  // namespace evmm
