// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pinned_state.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/support/log.hpp"

#include <chrono>
#include <exception>
#include <utility>

namespace evmm {

namespace {

using pinned::block;
using pinned::stream_use;

constexpr auto k_pause = std::chrono::microseconds(100);  ///< of the background thread

}  // namespace

/// An event behind what is enqueued on the stream; null while the stream is being captured, when
/// an event would become a part of the capture.
native_event pinned_host_allocator::state::record_event(const stream_use& stream) {
  const device_scope here(*on_, stream.first);  // whose default stream is meant
  if (on_->capture(stream.second).status != capture_status::none) return nullptr;
  native_event event = nullptr;
  {
    const std::lock_guard lock(mutex_);
    event = marks_.reuse(stream.first);
  }
  if (event == nullptr) {
    event = on_->create_event(stream.first);
    try {
      const std::lock_guard lock(mutex_);
      marks_.made(stream.first);
    } catch (...) {
      insist("destroying an event", [&] { on_->destroy_event(event); });
      throw;
    }
  }
  try {
    on_->record(event, stream.second);
  } catch (...) {
    return_event(stream.first, event);
    throw;
  }
  return event;
}

void pinned_host_allocator::state::return_event(device_id of, native_event event) noexcept {
  const std::lock_guard lock(mutex_);
  marks_.spare(of, event);
}

// ---------------------------------------------------------------------

bool pinned_host_allocator::state::poll() {
  if (waiting_.load() == 0) return true;
  const std::unique_lock asking(asking_, std::try_to_lock);
  if (!asking) return false;
  poll_locked();
  return true;
}

void pinned_host_allocator::state::poll_locked() {
  bool oversize = false;
  for (;;) {
    {
      const std::lock_guard lock(mutex_);
      marks_.heads(heads_);
    }
    std::erase_if(heads_, [&](auto& head) { return !passed(head); });
    if (heads_.empty()) break;
    const std::lock_guard lock(mutex_);
    for (const auto& head : heads_) {
      block& of = *marks_.pop(head.stream).of;
      if (--of.marks > 0) continue;
      count_free(of);
      oversize = is_oversize(blocks_.give(of)) || oversize;
    }
    waiting_.store(marks_.waiting());
  }
  if (oversize) give_back_oversize();
}

bool pinned_host_allocator::state::passed(pinned::mark_table::head& asked) noexcept {
  try {
    if (asked.first.event == nullptr) {
      const native_event event = record_event(asked.stream);
      if (event == nullptr) return false;  // its capture goes on
      asked.first.event = event;
      const std::lock_guard lock(mutex_);
      marks_.set_event(asked.stream, event);
    }
    return on_->done(asked.first.event);
  } catch (const std::exception& failure) {
    // The block stays where it is: nobody knows whether the stream is past it.
    if (!warned_.exchange(true)) {
      log().warn("cannot tell whether a stream is past its use of pinned memory: {}",
                 failure.what());
    }
    return false;
  }
}

void pinned_host_allocator::state::wait_for_streams() {
  const std::lock_guard asking(asking_);
  std::vector<pinned::mark_table::head> awaited;
  for (;;) {
    poll_locked();
    const std::size_t before = waiting_.load();
    {
      const std::lock_guard lock(mutex_);
      marks_.heads(awaited);
    }
    std::erase_if(awaited, [](const auto& head) { return head.first.event == nullptr; });
    if (awaited.empty()) return;
    for (const auto& head : awaited) on_->synchronize(head.first.event);
    poll_locked();
    if (waiting_.load() >= before) return;  // they cannot be asked, or threads keep adding
  }
}

void pinned_host_allocator::state::run() {
  std::unique_lock lock(mutex_);
  while (!stop_) {
    if (marks_.waiting() == 0) {
      wake_.wait(lock, [&] { return stop_ || marks_.waiting() > 0; });
      continue;
    }
    lock.unlock();
    log_failure("asking streams about pinned memory", [&] { poll(); });
    lock.lock();
    wake_.wait_for(lock, k_pause, [&] { return stop_; });
  }
}

}  // namespace evmm
