// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/pause.hpp"

#include <atomic>
#include <chrono>
#include <thread>

namespace [[gnu::visibility("default")]] evmm {

/// A lock for the few nanoseconds in which an arena's books are changed: a driver is called under
/// it only to record and ask events of blocks that other streams used, and where memory has run
/// out. It spins, and sleeps when that does not help, since whoever holds it has lost its core then
/// (it does not yield: `patience` says why).
class spin_lock {
 public:
  void lock() noexcept {
    if (!held_.exchange(true, std::memory_order_acquire)) return;
    lock_contended();
  }
  bool try_lock() noexcept { return !held_.exchange(true, std::memory_order_acquire); }
  void unlock() noexcept { held_.store(false, std::memory_order_release); }

 private:
  [[gnu::noinline]] void lock_contended() noexcept {
    unsigned spins = 1;
    do {
      while (held_.load(std::memory_order_relaxed)) {
        if (spins < 512) {
          for (unsigned i = 0; i < spins; ++i) pause_core();
          spins *= 2;
        } else {
          std::this_thread::sleep_for(std::chrono::microseconds(10));
        }
      }
    } while (held_.exchange(true, std::memory_order_acquire));
  }

  std::atomic<bool> held_ = false;
};

}  // namespace evmm
