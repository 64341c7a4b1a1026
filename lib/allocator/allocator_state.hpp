// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/arena.hpp"
#include "lib/allocator/event_pool.hpp"
#include "lib/allocator/history.hpp"
#include "lib/allocator/ledger.hpp"
#include "lib/allocator/live_options.hpp"
#include "lib/allocator/memory_supply.hpp"
#include "lib/allocator/other_backend.hpp"
#include "lib/allocator/page_map.hpp"
#include "lib/allocator/pool_record.hpp"
#include "lib/allocator/size_rules.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/support/fork_guard.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/error.hpp>

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <shared_mutex>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// The allocator behind its public face.
///
/// Locks, in order: `slow`, then arenas (several only under `slow`), then leaves (the ledger's is
/// taken with no arena locked). The hot path takes one arena's lock and nothing else.
struct caching_allocator::state {
  state(std::shared_ptr<driver> driver, device_id device, const allocator_options& options);
  ~state();

  // --- the hot path (caching_allocator.cpp) ---------------------------------------------------

  arena& arena_for(native_stream stream, size_class kind) {
    const thread_entry& seen = thread_entry::of(stream);
    if (seen.allocator == id && seen.stream == stream &&
        seen.epoch == routing.load(std::memory_order_relaxed)) {
      return *seen.arenas[static_cast<std::size_t>(kind)];
    }
    return find_arena(stream, kind);
  }
  arena& find_arena(native_stream stream, size_class kind);
  /// A free block of `from`, which is locked, made live; null when there is none. Lets go of the
  /// lock when it throws.
  block* find_free(arena& from, std::size_t size);
  /// The rest of allocate() where a free block was found and more than the books wants to know of
  /// it, or where none was; lets go of `from`, which is locked.
  void* allocate_slowly(arena& from, block* found, std::size_t size, std::size_t bytes);
  /// What free() does with a block that other streams used; its arena is locked.
  void defer(arena& owner, block& freed, std::unique_lock<spin_lock>& held);
  /// Frees with no lock held; throws for what is not a live allocation.
  void free(address at);
  /// Counts a block that was just taken from `from`, locked through `held`, and lets go.
  void* hand_out(arena& from, block& taken, std::size_t bytes, std::unique_lock<spin_lock>& held);
  void note(trace_action action, const arena& where, const block& what) noexcept;
  /// The block that lives at `at`, its arena locked by `held`; null when there is none.
  block* live_block(address at, std::unique_lock<spin_lock>& held) const;
  /// Deferred frees of `from`, which is locked, that are over by now.
  void poll(arena& from);
  void complete(arena& owner, block& freed) noexcept;
  /// Whether a stream that uses the block, which other streams used, is being captured.
  bool in_capture(const arena& owner, const block& used) const;

  // --- requests that need memory (request.cpp) ------------------------------------------------

  struct taken {
    arena* from;
    block* what;
  };
  /// Memory for a request that no free block serves; the arena it comes from is locked by `held`.
  taken request(arena& from, std::size_t size, std::size_t bytes,
                std::unique_lock<spin_lock>& held);
  /// Bytes live or pending: the most there ever were, and with the request served.
  struct live_bytes {
    std::size_t peak;
    std::size_t next;
  };
  /// The ladder of request().
  taken find_memory(arena& from, std::size_t size, std::size_t bytes, const live_bytes& live,
                    std::unique_lock<spin_lock>& held,
                    std::unique_lock<std::recursive_mutex>& lock);
  block* extend(arena& from, std::size_t size, const supply_terms& terms,
                std::unique_lock<spin_lock>& held);
  bool expandable(const arena& from) const;
  bool ask_for_frees(std::unique_lock<std::recursive_mutex>& lock);
  void collect_garbage();
  taken take_from_pools(arena& from, std::size_t size, std::unique_lock<spin_lock>& held);
  /// Gives back up to `wanted` bytes of what nobody uses, idle streams first; of one tier or all.
  std::size_t give_back(std::size_t wanted, std::optional<tier> where,
                        const pool_record* only = nullptr);
  std::unique_lock<spin_lock> lock_quiet(arena& one);
  /// Waits for the event that was recorded first, of `first` if it has any, else of any arena if
  /// `others` count; returns its arena.
  arena* wait_for_event(arena& first, bool others = true);
  /// Waits for every stream that may use the memory of an arena that is going.
  void wait_for_users(arena& going);
  [[noreturn]] void fail(const arena& from, std::size_t size, std::size_t bytes, bool rejected,
                         std::unique_lock<std::recursive_mutex>& lock);
  oom_report report_of(std::size_t bytes, bool rejected) const;
  void record(const oom_report& report, const arena& from);
  void tell(const oom_report& report);  ///< with no lock held
  /// By another backend, which has no ladder of its own.
  void* allocate_elsewhere(std::size_t bytes, native_stream stream);
  void free_elsewhere(void* pointer);
  std::size_t reservation_for(const arena& of, tier where) const;
  std::size_t limit() const;
  void count_inactive_splits();
  bool capturing(native_stream stream) const {
    return on->capture(stream).status != capture_status::none;
  }

  /// Takes `slow` for a call from outside. Throws invalid_argument in a forked child: what a thread
  /// of the parent had locked stays locked there.
  std::unique_lock<std::recursive_mutex> enter() const {
    process.check();
    return std::unique_lock(slow);
  }

  /// Refuses a function that cannot be called here, rather than wherever it is called.
  template <class Function>
  static void check_callable(const Function& given, const char* whose) {
    if (!given) throw invalid_argument(std::string(whose) + " is given no function to call");
  }

  // --- pools (pools.cpp) ----------------------------------------------------------------------

  pool_record& pool(pool_id id) const;
  void route_changed() noexcept { routing.fetch_add(1, std::memory_order_relaxed); }
  void wait_for_replays();
  void drop_if_unused(pool_record& gone);
  bool make_empty(arena& one);
  /// Where an allocation of this thread goes now; under arenas_guard.
  pool_id routed_to(native_stream stream) const;
  /// What was freed in captures waits for events from now on, once no stream that used it is
  /// captured any more. When that fails, the rest waits for the next call.
  void settle_captured();

  /// What a thread found last for a stream.
  struct thread_entry {
    std::uint64_t allocator;
    native_stream stream;
    std::uint64_t epoch;
    arena* arenas[2];
    static thread_entry& of(native_stream stream) noexcept;
  };
  struct route {
    pool_id to;
    std::function<bool(native_stream)> filter;
    std::thread::id begun_by;
  };

  const std::uint64_t id;
  /// In what other processes import. Drawn: processes of containers may have the same number.
  const std::uint64_t shared_as;
  const std::shared_ptr<driver> on;
  const device_id device;
  const std::size_t total_bytes;
  live_options options;
  size_rules rules{options};
  fork_guard process;
  std::atomic<std::uint64_t> clock = 1;
  std::atomic<std::uint64_t> routing = 1;  ///< changes whenever an arena may be another
  page_map pages;
  event_pool events;
  history happened;
  ledger books;
  std::unique_ptr<other_backend> other;

  mutable std::recursive_mutex slow;  ///< observers may ask for statistics from under it
  memory_supply supply;
  std::map<pool_id, std::unique_ptr<pool_record>> pools;
  std::uint64_t next_pool = 1;
  int captures = 0;  ///< of all pools

  mutable std::shared_mutex
      arenas_guard;  ///< the tables below and the routes; under it only the ledger's
  std::map<std::pair<pool_id, native_stream>, std::unique_ptr<ledger_account>> accounts;
  std::map<std::tuple<pool_id, native_stream, size_class>, std::unique_ptr<arena>> arenas;
  std::vector<arena*> all_arenas;
  std::vector<route> routes;
  /// Of pools that are gone: a thread may still look at one before it finds that out.
  std::vector<std::unique_ptr<ledger_account>> retired_accounts;
  std::vector<std::unique_ptr<arena>> retired_arenas;
  std::vector<std::unique_ptr<pool_record>> pools_gone;
  std::map<native_stream, std::string> stream_classes;

  // Scalars of the statistics; under `slow`, oversize under its own lock.
  std::int64_t retries = 0, ooms = 0, rejections = 0, full_waits = 0;
  pool_statistic inactive_split, inactive_split_bytes;
  std::mutex oversize_guard;
  statistic oversize_allocations;

  std::mutex observers_guard;
  std::vector<std::weak_ptr<std::function<void(const oom_report&)>>> oom_observers;
  std::vector<std::weak_ptr<std::function<bool()>>> shortage_callbacks;

  struct shared_mapping;
  std::mutex imports_guard;
  std::map<std::string, std::weak_ptr<shared_mapping>> imports;
};

}  // namespace evmm
