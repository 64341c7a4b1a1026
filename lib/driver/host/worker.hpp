// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

namespace evmm::host {

using work = std::function<void()>;

/// Whether the calling thread is a worker: it runs a function that was enqueued.
bool on_worker_thread() noexcept;

/// A point in a queue of work that is reached once. An event that is recorded anew gets a new one,
/// so whoever waits for the old record is not held up by the new.
class completion {
 public:
  void set() noexcept {
    reached_.store(true, std::memory_order_release);
    reached_.notify_all();
  }
  bool reached() const noexcept { return reached_.load(std::memory_order_acquire); }
  void wait() const noexcept { reached_.wait(false, std::memory_order_acquire); }

 private:
  std::atomic<bool> reached_ = false;
};

/// A thread that runs what is pushed, in order: what a stream is made of.
class worker {
 public:
  worker();
  worker(const worker&) = delete;
  worker& operator=(const worker&) = delete;
  /// Runs what was pushed, then ends. Does not wait when it is the worker itself that destroys it.
  ~worker();

  void push(work next);
  bool idle() const;
  /// Waits for all that was pushed so far, then throws the first exception since the last call.
  void synchronize();
  /// No more work will be pushed. The thread ends when it has run what there is.
  void close();
  /// Whether it ended, so that destroying it takes no time.
  bool ended() const;

 private:
  struct queue;
  static void run(queue& work);

  std::shared_ptr<queue> queue_;
  std::thread thread_;
};

}  // namespace evmm::host
