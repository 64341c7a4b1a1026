// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>

namespace [[gnu::visibility("default")]] evmm {

/// The lock of one stream's arenas, held for the few nanoseconds in which their books change.
///
/// Nearly always one thread serves a stream, so the lock leans towards the thread that took it
/// last: that thread enters by plain loads and stores. Any other thread first takes the lean away,
/// with a barrier on all threads of the process (membarrier), after which the lock is an ordinary
/// spin lock until one thread has taken it many times in a row, more often each time. Where the kernel has no membarrier
/// it always is. Waiting threads spin, then give way: nothing under it calls a driver except where
/// memory has run out.
class arena_lock {
 public:
  void lock() noexcept {
    const std::uint32_t me = thread_number();
    if (leans_to_.load(std::memory_order_relaxed) == me) {
      inside_.store(true, std::memory_order_relaxed);
      // Orders the store before the load as far as the compiler goes; the processor is ordered by
      // the barrier of whoever takes the lean away.
      std::atomic_signal_fence(std::memory_order_seq_cst);
      if (leans_to_.load(std::memory_order_relaxed) == me) [[likely]] {
        entered_leaning_ = true;
        return;
      }
      inside_.store(false, std::memory_order_release);
    }
    lock_upright(me);
  }
  void unlock() noexcept {
    if (entered_leaning_) {
      entered_leaning_ = false;
      inside_.store(false, std::memory_order_release);
    } else {
      held_.store(false, std::memory_order_release);
    }
  }

 private:
  /// 1 and up, never given twice.
  static std::uint32_t thread_number() noexcept {
    if (own_number_ == 0) [[unlikely]] take_number();
    return own_number_;
  }
  static void take_number() noexcept;
  void lock_upright(std::uint32_t me) noexcept;

  [[gnu::tls_model("initial-exec")]] static constinit thread_local std::uint32_t own_number_;

  std::atomic<std::uint32_t> leans_to_ = 0;  ///< a thread, or 0; set under held_
  std::atomic<bool> inside_ = false;         ///< that thread is in
  std::atomic<bool> held_ = false;           ///< another is in, or on its way
  // Under the lock:
  bool entered_leaning_ = false;
  std::uint32_t last_ = 0;     ///< who took it last
  std::uint32_t in_a_row_ = 0;
  std::uint32_t many_ = 256;  ///< times in a row before it leans; doubles with each time it was wrong
};

}  // namespace evmm
