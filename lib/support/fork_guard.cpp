// SPDX-License-Identifier: Apache-2.0
#include "lib/support/fork_guard.hpp"

#include <evmm/error.hpp>

#include <atomic>

#include <pthread.h>

namespace evmm {

namespace {

std::atomic<int> generation{0};

void count_forks() {
  static const int registered =
      pthread_atfork(nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
}

}  // namespace

fork_guard::fork_guard() {
  count_forks();
  generation_ = generation.load(std::memory_order_relaxed);
}

bool fork_guard::forked() const noexcept {
  return generation.load(std::memory_order_relaxed) != generation_;
}

void fork_guard::check(std::source_location where) const {
  if (!forked()) return;
  throw invalid_argument("the driver was made before a fork, and this is the child",
                         "start children with exec (spawn), or make the driver after the fork", 0,
                         where);
}

}  // namespace evmm
