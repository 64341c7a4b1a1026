// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/pinned_blocks.hpp"
#include "lib/allocator/pinned_marks.hpp"
#include "lib/allocator/pinned_memory.hpp"
#include "lib/support/fork_guard.hpp"

#include <evmm/allocator/pinned_host_allocator.hpp>
#include <evmm/error.hpp>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <string>
#include <thread>

namespace evmm {

/// Two locks, taken in this order and never by the driver's calls: `asking_`, by whoever asks the
/// streams (one thread at a time: only it takes marks out, so that the events it asks stay there),
/// and `mutex_`, for the tables and counts.
struct pinned_host_allocator::state {
  state(std::shared_ptr<driver> on, device_id device, const pinned_options& options);
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  /// Gives everything back. Not to be called in a forked child.
  ~state();

  void* allocate(std::size_t bytes);
  void free(void* at);
  bool record(const void* at, native_stream stream, device_id of);
  std::size_t empty_cache();
  /// Frees the blocks whose streams are past their uses. False when another thread is at it.
  bool poll();

  const std::shared_ptr<driver> on_;
  const device_id device_;
  const pinned_options options_;
  const fork_guard process_;
  mutable std::mutex mutex_;
  pinned::block_table blocks_;
  pinned_statistics counts_;

 private:
  std::size_t rounded(std::size_t bytes, bool in_reserve) const;
  pinned::block* from_cache(std::size_t bytes, std::size_t requested, bool any);
  /// Out of the reserve segment, which is made at the first call; null when it is full.
  pinned::block* from_reserve(std::size_t requested);
  pinned::block* from_driver(std::size_t bytes, std::size_t requested);
  /// After out_of_memory: gives back what is cached, takes what is too large, waits for streams.
  pinned::block* when_full(std::size_t bytes, std::size_t requested, const out_of_memory& failure);
  [[noreturn]] void throw_out_of_memory(std::size_t bytes, std::size_t requested,
                                        const out_of_memory& failure);

  /// Memory from the driver: a live block, or the reserve segment.
  pinned::block* take(std::size_t bytes, bool reserve, std::size_t requested = 0);
  /// Gives segments back that are free and larger than `above`. What fails stays; `failed` is told.
  std::size_t give_back(std::size_t above, const std::function<void()>& failed);
  bool is_oversize(const pinned::block& which) const;
  void give_back_oversize() noexcept;

  native_event record_event(const pinned::stream_use& stream);
  void make_context();
  void return_event(device_id of, native_event event) noexcept;
  void poll_locked();
  /// Whether the mark is reached; records what could not be recorded before. Does not throw.
  bool passed(pinned::mark_table::head& asked) noexcept;
  void wait_for_streams();
  void count_live(const pinned::block& which);
  void count_free(const pinned::block& which);
  void run();

  pinned::memory_source memory_;
  pinned::mark_table marks_;
  std::atomic<std::size_t> waiting_{0};  ///< marks; read without the lock
  std::mutex asking_;
  std::vector<pinned::mark_table::head> heads_;  ///< of whoever holds asking_
  std::mutex reserving_;
  std::atomic<bool> reserve_tried_{false};
  std::atomic<bool> has_context_{false};
  std::atomic<bool> warned_{false};
  std::condition_variable wake_;
  bool stop_ = false;
  std::thread asker_;  ///< with background_thread
};

}  // namespace evmm
