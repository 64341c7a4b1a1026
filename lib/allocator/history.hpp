// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/caching_allocator.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Return addresses of one call, innermost first; names are looked up only for a snapshot.
struct call_stack {
  std::vector<void*> frames;
  static std::shared_ptr<const call_stack> here();
  std::vector<stack_frame> resolve() const;
};

/// What the calling thread says about its allocations.
struct thread_notes {
  std::vector<std::shared_ptr<const std::string>> compile_contexts;
  std::shared_ptr<const std::string> user_metadata;
  static thread_notes& mine();
};

/// The last events of an allocator, in a ring, and who listens to them.
/// Threads: any. record() calls the listeners on the thread of the event, under its locks.
class history {
 public:
  struct event {
    trace_action action;
    address at;
    std::size_t bytes;
    native_stream stream;
    pool_id pool;
    std::shared_ptr<const call_stack> stack = {};
  };

  explicit history(device_id device) : device_(device) {}

  /// Whether record() does anything: one load, for the hot path.
  bool wanted() const noexcept { return wanted_.load(std::memory_order_relaxed); }
  bool wants_stack(trace_action action) const noexcept;
  void record(const event& what) noexcept;
  void annotate(std::vector<std::pair<std::string, std::string>> values);
  void configure(const history_options& options);
  caching_allocator::subscription listen(std::function<void(const trace_entry&)> listener);

  std::vector<trace_entry> entries() const;
  std::vector<annotation> annotations() const;
  history_level level() const;

 private:
  struct kept {
    event what;
    std::int64_t time_us;
    std::shared_ptr<const std::string> context, metadata;
  };
  using listener_function = std::function<void(const trace_entry&)>;

  trace_entry describe(const kept& one, bool stacks) const;
  void update_wanted();
  void trim_annotations();
  /// Forgets listeners that are gone.
  void drop_deaf();

  device_id device_;
  std::atomic<bool> wanted_ = false;
  std::atomic<std::uint8_t> stacks_ = 0;  ///< history_level that takes stacks
  mutable std::mutex guard_;
  history_options options_{.level = history_level::off};
  std::vector<kept> ring_;
  std::size_t next_ = 0;  ///< where the ring, once full, is written
  std::deque<annotation> annotations_;
  std::vector<std::weak_ptr<listener_function>> listeners_;
};

/// A pool's number in snapshots.
inline pool_number number_of(pool_id pool) {
  return {0, static_cast<std::uint64_t>(pool)};
}

}  // namespace evmm
