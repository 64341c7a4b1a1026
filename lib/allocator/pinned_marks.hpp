// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/pinned_blocks.hpp"

#include <evmm/driver.hpp>

#include <cstddef>
#include <deque>
#include <map>
#include <vector>

namespace evmm::pinned {

/// What a freed block waits for on one stream.
struct mark {
  block* of = nullptr;
  native_event event = nullptr;  ///< null: the stream was being captured, nothing is recorded yet
};

/// Marks by stream, in the order in which they were recorded, and the events that are free to be
/// recorded anew. Bookkeeping only, not thread-safe. Taking a mark out needs no memory.
class mark_table {
 public:
  struct head {
    stream_use stream;
    mark first;
  };

  /// All or none.
  void add(const std::vector<stream_use>& streams, const std::vector<mark>& marks);
  /// The oldest mark of each stream.
  void heads(std::vector<head>& out) const;
  /// The stream's oldest mark now has this event.
  void set_event(const stream_use& stream, native_event event);
  /// Takes the stream's oldest mark out; its event is spare.
  mark pop(const stream_use& stream) noexcept;
  std::size_t waiting() const noexcept { return waiting_; }

  /// A spare event of the device; null when there is none.
  native_event reuse(device_id device) noexcept;
  /// Notes an event that was made, so that there is room for it among the spare ones.
  void made(device_id device);
  void spare(device_id device, native_event event) noexcept;
  /// Empties the spare events into `out`.
  void drain(std::vector<native_event>& out);

 private:
  struct pool {
    std::size_t made = 0;
    std::vector<native_event> spare;
  };
  std::map<stream_use, std::deque<mark>> queues_;
  std::map<device_id, pool> pools_;
  std::size_t waiting_ = 0;
};

}  // namespace evmm::pinned
