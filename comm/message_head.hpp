// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/types.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

// What the channels of two ranks say to each other about the parts of a region.

namespace evmm {

/// Where this rank's part of a region lies, and how much of it is backed, which another thread may
/// change.
struct own_part {
  address base = 0;
  std::atomic<std::size_t> size = 0;

  bool holds(std::size_t offset, std::size_t bytes) const {
    const std::size_t backed = size.load(std::memory_order_acquire);
    return bytes <= backed && offset <= backed - bytes;
  }
};

/// What goes over the link before a message's bytes.
struct message_head {
  enum kind : std::uint32_t {
    put,              ///< bytes for the receiver's part
    get,              ///< asks for bytes of it
    answer,           ///< bytes that were asked for
    request_to_send,  ///< a large put: the receiver is to receive it when it can
    clear_to_send,    ///< the receiver began to receive some of it, or of a large get
    received,         ///< all of a large put is there
    in_line,          ///< what the receiver puts, or is to be sent, waits for its turn, which
                      ///< comes nearer
  };
  enum signal_place : std::uint64_t { none, data, control };

  std::uint32_t magic = 0x65766d63;  // "evmc"
  std::uint32_t what = put;
  std::uint64_t offset = 0;  ///< in the receiver's part; in what was asked for or offered, where
                             ///< there is an id of it
  std::uint64_t bytes = 0;   ///< of this message, or meant
  std::uint64_t id = 0;      ///< of a get, and back with its answer; of a large put, likewise
  std::uint64_t signals = none;
  std::uint64_t signal_offset = 0;
  std::uint64_t signal_value = 0;
};
static_assert(std::has_unique_object_representations_v<message_head>);

/// What other ranks may write to here.
struct own_parts {
  own_part data;
  own_part control;  ///< the channel's own words

  const own_part& signalled(const message_head& head) const {
    return head.signals == message_head::control ? control : data;
  }
  /// A rank may have grown its region, and put to it, before this rank has heard that all did.
  bool reach(const message_head& head) const {
    return data.holds(head.offset, head.bytes) &&
           (head.signals == message_head::none ||
            signalled(head).holds(head.signal_offset, sizeof(std::uint64_t)));
  }
};

/// Bytes to put into another rank's part.
struct far_piece {
  rank_id to;
  address from = 0;
  std::size_t bytes = 0;
  std::size_t offset = 0;
  std::optional<signal_word> signal = std::nullopt;
  bool control = false;  ///< the signal is one of the channel's own words
  bool large = false;    ///< goes by large_transfers

  void signal_with(message_head& head) const {
    if (!signal) return;
    head.signals = control ? message_head::control : message_head::data;
    head.signal_offset = signal->offset;
    head.signal_value = signal->value;
  }
};

/// Bytes of another rank's part that are to come.
struct far_get {
  using clock = std::chrono::steady_clock;
  rank_id from;
  std::size_t offset = 0;
  address into = 0;
  std::size_t bytes = 0;
  bool large = false;  ///< comes by large_transfers
  std::size_t received = 0;
  clock::time_point since = {};  ///< in messages: when the last bytes came
};

}  // namespace evmm
