// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/pause.hpp"

#include <algorithm>
#include <chrono>
#include <thread>

namespace evmm {

/// Waiting for other threads or processes by looking again and again: without a rest at first, then
/// with longer and longer ones. Where cores are few the first phase is short, as others may need
/// this one to get there.
///
/// It never yields. Ranks that were started over ssh, each a session and so a scheduling group of
/// its own, left each other standing for up to 20 s by sched_yield() in loops, on two cores with
/// Linux 6.18; with sleeps they do not.
class patience {
 public:
  void spend() {
    const auto waited = clock::now() - since_;
    if (waited < restless()) {
      pause_core();
    } else {
      std::this_thread::sleep_for(std::min<clock::duration>(waited / 8, longest_rest));
    }
  }
  /// Something came: what comes next is likely near.
  void renew() { since_ = clock::now(); }

 private:
  using clock = std::chrono::steady_clock;
  static constexpr std::chrono::microseconds longest_rest{100};

  static clock::duration restless() {
    static const bool many_cores = std::thread::hardware_concurrency() > 4;
    return many_cores ? std::chrono::milliseconds(1) : std::chrono::microseconds(20);
  }

  clock::time_point since_ = clock::now();
};

}  // namespace evmm
