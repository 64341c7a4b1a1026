// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/fork_guard.hpp"

#include <atomic>

#include <pthread.h>

namespace evmm::host {

namespace {
std::atomic<unsigned> generation = 0;
}  // namespace

unsigned fork_generation() noexcept {
  static const int registered = ::pthread_atfork(
      nullptr, nullptr, [] { generation.fetch_add(1, std::memory_order_relaxed); });
  static_cast<void>(registered);
  return generation.load(std::memory_order_relaxed);
}

}  // namespace evmm::host
