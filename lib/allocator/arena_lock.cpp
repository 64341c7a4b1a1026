// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/arena_lock.hpp"

#include <linux/membarrier.h>
#include <sys/syscall.h>
#include <thread>
#include <unistd.h>

namespace evmm {

namespace {

constexpr std::uint32_t most_many = std::uint32_t{1} << 24;

bool can_lean() noexcept {
  static const bool registered =
      syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
  return registered;
}

void pause() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

/// Spins while `busy`, longer each time, then gives way.
template <class Busy>
void wait_while(Busy&& busy) noexcept {
  for (unsigned spins = 1; busy();) {
    if (spins > 512) {
      std::this_thread::yield();
      continue;
    }
    for (unsigned i = 0; i < spins; ++i) pause();
    spins *= 2;
  }
}

}  // namespace

constinit thread_local std::uint32_t arena_lock::own_number_ = 0;

void arena_lock::take_number() noexcept {
  static std::atomic<std::uint32_t> last = 0;
  own_number_ = last.fetch_add(1, std::memory_order_relaxed) + 1;
}

void arena_lock::lock_upright(std::uint32_t me) noexcept {
  while (held_.exchange(true, std::memory_order_acquire)) {
    wait_while([&] { return held_.load(std::memory_order_relaxed); });
  }
  if (leans_to_.load(std::memory_order_relaxed) != 0) {
    leans_to_.store(0, std::memory_order_relaxed);
    // After this every thread has either seen that the lock leans no more, or has shown itself.
    syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
    wait_while([&] { return inside_.load(std::memory_order_acquire); });
    if (many_ < most_many) many_ *= 2;
  }
  if (last_ != me) {
    last_ = me;
    in_a_row_ = 0;
  } else if (++in_a_row_ >= many_ && can_lean()) {
    in_a_row_ = 0;
    leans_to_.store(me, std::memory_order_relaxed);
  }
}

}  // namespace evmm
