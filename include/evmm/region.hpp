// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

// What elastic_region and symmetric_region have in common.

namespace [[gnu::visibility("default")]] evmm {

enum class segment_state : std::uint8_t {
  mapped,     ///< backed and accessible
  discarded,  ///< addresses kept, memory given back; touching it is a fault until restore()
  retiring,   ///< dropped by shrink_later(), unmapped once the streams are past it
};

/// One physical handle behind a part of a region.
struct segment {
  std::size_t offset = 0;  ///< from the region's base
  std::size_t bytes = 0;
  memory_location where;  ///< where it lies, or lay before it was discarded
  segment_state state = segment_state::mapped;
};

/// Streams and events that may still use the memory a call takes away. The call waits until the
/// work enqueued on them so far is done before it unmaps anything. The default stream is that of
/// the region's device. What belongs to a capture under way is refused: invalid_argument.
struct uses {
  std::span<const native_stream> streams = {};
  std::span<const native_event> events = {};
};

/// What becomes of the contents of discarded segments.
enum class contents : std::uint8_t {
  drop,    ///< restored memory is zeroed or stale: undefined
  backup,  ///< copied to host memory and copied back by restore()
};

enum class change_kind : std::uint8_t { grow, shrink, migrate, discard, restore, compact };
const char* to_string(change_kind kind) noexcept;

/// One change of a region, as its observers see it.
struct region_change {
  change_kind kind = change_kind::grow;
  std::uint64_t epoch =
      0;                   ///< before_change: the epoch that ends; after_change: the one that holds
  std::size_t offset = 0;  ///< the affected bytes, from the region's base
  std::size_t bytes = 0;
  bool committed = false;  ///< after_change: false when the change was rolled back
};

/// Follows a region's changes: what an NCCL window, a cache of pointers or a registration needs.
struct region_observer {
  /// Called before anything is unmapped or replaced, while the old memory is still there. May
  /// throw to forbid the change: everything is rolled back and the exception reaches the caller.
  /// A deferred change stays pending then, and the next poll(), finish() or change asks again.
  std::function<void(const region_change&)> before_change = {};
  /// Called after, with the memory in place, also when the change was rolled back. An exception
  /// is logged, not propagated.
  std::function<void(const region_change&)> after_change = {};
};

/// Keeps an observer registered; unregisters when destroyed. May outlive the region.
using observer_subscription = std::shared_ptr<void>;

/// Counts since construction, and what is held now.
struct region_statistics {
  std::size_t device_bytes = 0;         ///< mapped DEVICE memory of this rank
  std::size_t host_bytes = 0;           ///< mapped HOST_NUMA memory of this rank
  std::size_t discarded_bytes = 0;      ///< addresses whose memory was given back
  std::size_t backup_bytes = 0;         ///< host memory that holds discarded contents
  std::size_t cached_bytes = 0;         ///< freed handles kept for reuse
  std::size_t cached_device_bytes = 0;  ///< of these, DEVICE memory
  std::size_t peak_bytes = 0;           ///< most ever mapped
  std::uint64_t grows = 0, shrinks = 0, migrations = 0, discards = 0, restores = 0;
  std::uint64_t compactions = 0;
  std::uint64_t rollbacks = 0;  ///< changes undone after a failure or a veto
  std::uint64_t handles_created = 0, handles_reused = 0, handles_released = 0;
  std::uint64_t bytes_copied = 0;  ///< by migrate, backup, restore and compact
};

/// The bytes that a grow() added.
struct grown {
  std::size_t offset = 0;
  std::size_t bytes = 0;
};

}  // namespace evmm
