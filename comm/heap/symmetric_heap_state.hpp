// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/heap/call_log.hpp"
#include "comm/heap/heap_blocks.hpp"
#include "comm/heap/heap_uses.hpp"
#include "lib/allocator/history.hpp"
#include "lib/allocator/ledger.hpp"
#include "lib/memory/device_scope.hpp"

#include <evmm/comm/symmetric_heap.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace evmm {

/// What the ranks tell each other at a collective step.
struct heap_status {
  call_state calls;
  std::array<std::size_t, 2> room;   ///< by tier: bytes that the heap may take
  std::array<std::size_t, 2> asked;  ///< by tier: request_growth()
  std::array<bool, 2> limited;       ///< by tier: by its limit, not by what there is
};

/// The heap behind its public face.
struct symmetric_heap::state {
  state(symmetric_region taken, const symmetric_heap_options& given);

  // --- allocate and free (symmetric_heap.cpp) -------------------------------------------------

  std::size_t allocate(std::size_t bytes, native_stream stream, const symmetric_request& request);
  void free(std::size_t offset);
  void record_stream(std::size_t offset, native_stream stream);
  /// The live block at `offset`. Throws invalid_argument.
  heap_block& live(std::size_t offset, const char* doing);
  /// Whether the block there was freed, and may still be used by a graph.
  bool is_pending(std::size_t offset) const;

  // --- memory (heap_growth.cpp) ---------------------------------------------------------------

  /// A place for a request: a free block, else more memory, else the next tier. Collective unless a
  /// free block of the first tier serves. Throws out_of_memory, the same on every rank.
  std::size_t find_place(std::size_t bytes, const symmetric_request& request);
  grown grow(tier kind, std::size_t bytes, pool_id pool);
  std::size_t size_after_trim(std::size_t keep_free) const;
  std::size_t trim(std::size_t after, const uses& in_use);
  /// Throws invalid_argument where what may not leave the device would do so with [from, to).
  void check_leaves(std::size_t from, std::size_t to, tier kind) const;
  std::size_t migrate(std::size_t from, std::size_t to, tier kind, const uses& in_use);
  std::size_t compact(const uses& in_use);

  /// Gathers, and compares the calls. Collective. One step whatever it is for: ranks that diverged
  /// come for different reasons, and are to find the call where they did.
  std::vector<heap_status> meet();
  /// Throws out_of_memory, the same on every rank, when a tier has not so much room.
  void require_room(tier kind, std::size_t bytes, const std::vector<heap_status>& ranks_now) const;
  /// Grows by what ranks asked for, as far as there is room; whether anything grew. Collective.
  bool serve_requests(const std::vector<heap_status>& ranks_now);

  // --- in common ------------------------------------------------------------------------------

  /// Throws invalid_argument after close(). While it lives, the default stream is that of this
  /// rank's device.
  [[nodiscard]] device_scope enter() const {
    check_open();
    return {region.on(), region.device()};
  }
  void check_open() const;
  void check_pool(pool_id pool) const;
  /// Frees what was freed under a capture that has ended.
  void settle_captured();
  /// Ends a call: what it gave, and the comparison after every call when that is asked for.
  void finish(std::uint64_t result);
  /// All that must be over before a change: what uses the bytes that it takes away, and all of the
  /// heap's where it takes down a window; on the heap's own account and the caller's.
  struct gathered_uses {
    std::vector<native_stream> streams;
    std::vector<native_event> events;
    uses all() const { return {streams, events}; }
  };
  gathered_uses uses_of(const region_change& change, const uses& in_use) const;
  gathered_uses uses_of(std::size_t from, std::size_t to, const uses& in_use) const;
  /// Reads the region's segments into `blocks`, which keep their pools; new ones are `pool`'s.
  /// Tiers of other ranks are as this rank's, since the heap changes them alike.
  void adopt_segments(pool_id pool);
  void set_segments(std::vector<heap_segment> segments);
  std::size_t segment_bytes(tier kind) const;
  /// Bytes of the segments `among` which lie in the other tier than `kind`.
  std::size_t bytes_to_move(tier kind, const std::function<bool(const heap_segment&)>& among) const;
  void note(trace_action action, std::size_t offset, std::size_t bytes, native_stream stream,
            pool_id pool);
  size_class class_of(std::size_t bytes) const noexcept {
    return bytes <= (std::size_t{1} << 20) ? size_class::small : size_class::large;
  }

  // Destroyed in reverse: events before the region, which keeps the driver.
  symmetric_region region;
  symmetric_heap_options options;
  heap_blocks blocks;
  heap_uses used;
  call_log calls;
  ledger books;
  ledger_account account;
  history happened;
  std::map<pool_id, symmetric_pool_options> pools;
  std::uint64_t next_pool = 1;
  std::vector<std::size_t> captured;  ///< freed under a capture, still live in `blocks`
  std::array<std::size_t, 2> asked = {};
  statistic segment_count, reserved_bytes;
  std::int64_t growths = 0;  ///< requests that found the heap full
  std::int64_t ooms = 0;
  bool closed = false;

 private:
  /// Takes the segments from `after` on off the region, and tells the history.
  void drop(std::size_t after, pool_id pool, const uses& in_use);
  /// Appends memory of one tier for `pool` if there is room: at least `least` bytes, at best
  /// `best`.
  bool try_grow(tier kind, std::size_t least, std::size_t best, pool_id pool,
                const std::vector<heap_status>& ranks_now);
  std::optional<std::size_t> grow_spanning(std::size_t bytes, const symmetric_request& request,
                                           const std::vector<heap_status>& ranks_now);
  [[noreturn]] void fail(std::size_t bytes, const symmetric_request& request,
                         const std::vector<heap_status>& ranks_now);
};

}  // namespace evmm
