// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// One frame of a C++ or Python stack.
struct stack_frame {
  std::string name;
  std::string filename;
  std::uint32_t line = 0;
  friend bool operator==(const stack_frame&, const stack_frame&) = default;
};

enum class block_state : std::uint8_t {
  active_allocated,     ///< live
  active_pending_free,  ///< freed, waiting for other streams
  inactive,             ///< free
};
const char* to_string(block_state state) noexcept;

/// A block of a segment: live, waiting, or free.
struct block_snapshot {
  address at = 0;
  std::size_t bytes = 0;
  std::size_t requested_bytes = 0;  ///< 0 when inactive
  block_state state = block_state::inactive;
  std::vector<stack_frame> frames = {};
  friend bool operator==(const block_snapshot&, const block_snapshot&) = default;
};

/// {0, 0} is the default pool; private pools have their numbers in either place, as in PyTorch.
using pool_number = std::pair<std::uint64_t, std::uint64_t>;

/// A run of addresses with memory behind it.
struct segment_snapshot {
  int device = 0;
  address at = 0;
  std::size_t total_bytes = 0;
  std::size_t allocated_bytes = 0;
  std::size_t active_bytes = 0;
  std::size_t requested_bytes = 0;
  native_stream stream = nullptr;
  bool large = false;
  pool_number pool = {};
  bool expandable = false;
  tier where = tier::device;
  std::vector<stack_frame> frames = {};
  std::vector<block_snapshot> blocks;  ///< ascending; they cover the segment
  friend bool operator==(const segment_snapshot&, const segment_snapshot&) = default;
};

enum class trace_action : std::uint8_t {
  alloc,
  free_requested,
  free_completed,
  segment_alloc,
  segment_free,
  segment_map,
  segment_unmap,
  snapshot,
  oom,
  annotate,
};
const char* to_string(trace_action action) noexcept;

/// One event of the history.
struct trace_entry {
  trace_action action = trace_action::alloc;
  int device = 0;
  address at = 0;         ///< for oom: bytes free on the device
  std::size_t bytes = 0;  ///< of allocations and frees what was asked for, as PyTorch has it
  native_stream stream = nullptr;
  std::int64_t time_us = 0;  ///< since the Unix epoch
  pool_number pool = {};
  std::string compile_context = {};
  std::string user_metadata = {};
  std::vector<stack_frame> frames = {};
  friend bool operator==(const trace_entry&, const trace_entry&) = default;
};

/// A named mark in time (record_annotation).
struct annotation {
  int device = 0;
  std::int64_t time_us = 0;
  std::vector<std::pair<std::string, std::string>> values;
  friend bool operator==(const annotation&, const annotation&) = default;
};

/// Everything that PyTorch's memory viewer shows.
struct allocator_snapshot {
  std::vector<segment_snapshot> segments;               ///< ascending by address
  std::vector<std::vector<trace_entry>> device_traces;  ///< by device, oldest first
  std::vector<annotation> external_annotations = {};
  std::vector<std::pair<std::string, std::string>> settings = {};  ///< allocator_settings
  friend bool operator==(const allocator_snapshot&, const allocator_snapshot&) = default;
};

/// The pickle that torch.cuda.memory._dump_snapshot writes (protocol 2), for
/// https://pytorch.org/memory_viz and torch.cuda._memory_viz. Raw bytes. A segment of the host tier
/// has one key that PyTorch does not know, `tier`: "host". Settings that PyTorch has are typed as
/// there where their text allows (True, 20971520, 0.8, [1:0,2:4]); all others are strings. What is
/// not UTF-8 in a text becomes U+FFFD.
std::string to_pickle(const allocator_snapshot& snapshot);
/// The same tree as JSON.
std::string to_json(const allocator_snapshot& snapshot);
/// Reads what to_pickle or PyTorch wrote, in any protocol from 2 to 5; keys that it does not know
/// are passed over. Throws invalid_argument naming the byte (0 is the first) where it ends or holds
/// what a snapshot does not. Nothing in a pickle can run code here.
allocator_snapshot from_pickle(std::string_view bytes);

}  // namespace evmm
