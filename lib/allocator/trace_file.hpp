// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/snapshot.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// One event of a recorded run of some allocator.
struct trace_event {
  enum class kind : std::uint8_t {
    allocate,
    free,   ///< asked for by the program
    freed,  ///< completed: no stream uses the memory any more. A recorder's view; a replay that
            ///< goes in stream order has no use for it
  };
  std::size_t bytes = 0;     ///< asked for; 0 unless `what` is allocate
  std::uint32_t id = 0;      ///< of the allocation: 0, 1, 2, ... in the order they were made
  std::uint16_t stream = 0;  ///< 0 is the default stream; 0 unless `what` is allocate
  kind what = kind::allocate;
  friend bool operator==(const trace_event&, const trace_event&) = default;
};

/// What was recorded, checked: each id is allocated once and before its free, freed at most once,
/// and completed at most once and after its free.
struct allocation_trace {
  std::string source;  ///< the file
  std::vector<trace_event> events;
  std::uint32_t allocations = 0;  ///< ids are below this
  unsigned streams = 1;           ///< stream numbers are below this
  std::size_t peak_bytes = 0;     ///< the most that was live at one time, as asked for
  std::size_t unknown_frees = 0;  ///< left out: frees of what was allocated before the recording
};

/// Reads lines of text; `name` is what errors call it.
///
///   a,ID,BYTES,STREAM   allocate; ID is any number that no other allocation has
///   f,ID                free
///   c,ID                the free completed
///
/// Empty lines and those that begin with # are skipped. Throws invalid_argument as `name:line: ...`
/// for any other line, an id that is unknown, doubled or freed already, and a text without events.
allocation_trace parse_trace(std::string_view text, const std::string& name);

/// The history of a snapshot, of the device that allocated most in it. Entries that were allocated
/// before the history began and are freed in it are left out and counted. A free_completed without
/// a free_requested before it, as in histories that skip the latter, is a free. Streams are
/// numbered from 1 in the order of their first use, the default stream is 0. Throws
/// invalid_argument when there is no allocation in it, or one that overlaps a live one.
allocation_trace parse_trace(const allocator_snapshot& snapshot, const std::string& name);

/// Reads a file of lines, or a pickled snapshot of PyTorch or evmm; either may be gzipped. Throws
/// invalid_argument with the file's name, also for one that ends in the middle.
allocation_trace read_trace(const std::string& path);

}  // namespace evmm
