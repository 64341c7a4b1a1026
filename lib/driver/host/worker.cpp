// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/worker.hpp"

#include <evmm/error.hpp>

#include <condition_variable>
#include <deque>
#include <exception>
#include <mutex>
#include <system_error>
#include <utility>

namespace evmm::host {

namespace {
thread_local bool is_worker = false;
}  // namespace

bool on_worker_thread() noexcept {
  return is_worker;
}

struct worker::queue {
  mutable std::mutex mutex;
  std::condition_variable pushed;
  std::condition_variable finished;
  std::deque<work> waiting;
  std::uint64_t pushed_count = 0;
  std::uint64_t finished_count = 0;
  std::exception_ptr failure;
  bool closed = false;
  bool ended = false;
};

worker::worker() : queue_(std::make_shared<queue>()) {
  try {
    thread_ = std::thread([shared = queue_] { run(*shared); });
  } catch (const std::system_error& failure) {
    throw driver_error(std::string("starting a stream's thread: ") + failure.what(),
                       "raise the limit of threads (ulimit -u), or use fewer streams",
                       failure.code().value());
  }
}

worker::~worker() {
  close();
  // The last owner of a driver may be a function that runs on one of its streams.
  if (thread_.get_id() == std::this_thread::get_id()) {
    thread_.detach();
  } else {
    thread_.join();
  }
}

void worker::run(queue& work_queue) {
  is_worker = true;
  std::unique_lock lock(work_queue.mutex);
  for (;;) {
    work_queue.pushed.wait(lock, [&] { return work_queue.closed || !work_queue.waiting.empty(); });
    if (work_queue.waiting.empty()) break;
    work next = std::move(work_queue.waiting.front());
    work_queue.waiting.pop_front();
    lock.unlock();
    std::exception_ptr failure;
    try {
      next();
    } catch (...) {
      failure = std::current_exception();
    }
    next = nullptr;  // what it holds is gone before anyone learns that it finished
    lock.lock();
    if (!work_queue.failure) work_queue.failure = failure;
    ++work_queue.finished_count;
    work_queue.finished.notify_all();
  }
  work_queue.ended = true;
}

void worker::push(work next) {
  const std::lock_guard lock(queue_->mutex);
  queue_->waiting.push_back(std::move(next));
  ++queue_->pushed_count;
  queue_->pushed.notify_one();
}

bool worker::idle() const {
  const std::lock_guard lock(queue_->mutex);
  return queue_->finished_count == queue_->pushed_count;
}

void worker::synchronize() {
  const auto shared = queue_;  // the stream may be destroyed meanwhile
  std::unique_lock lock(shared->mutex);
  const auto target = shared->pushed_count;
  shared->finished.wait(lock, [&] { return shared->finished_count >= target; });
  if (auto failure = std::exchange(shared->failure, nullptr)) std::rethrow_exception(failure);
}

void worker::close() {
  const std::lock_guard lock(queue_->mutex);
  queue_->closed = true;
  queue_->pushed.notify_one();
}

bool worker::ended() const {
  const std::lock_guard lock(queue_->mutex);
  return queue_->ended;
}

}  // namespace evmm::host
