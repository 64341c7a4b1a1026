// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/staging.hpp"
#include "comm/wire.hpp"
#include "lib/memory/copier.hpp"

#include <evmm/comm/node_link.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/driver.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <optional>

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

/// What other ranks may write to here.
struct own_parts {
  own_part data;
  own_part control;  ///< the channel's own words
};

/// Bytes to put into another rank's part.
struct far_piece {
  rank_id to;
  address from = 0;
  std::size_t bytes = 0;
  std::size_t offset = 0;
  std::optional<signal_word> signal = std::nullopt;
  bool control = false;  ///< the signal is one of the channel's own words
};

/// What goes over the link before a message's bytes.
struct message_head {
  enum kind : std::uint32_t { put, get, answer };
  enum signal_place : std::uint64_t { none, data, control };

  std::uint32_t magic = 0x65766d63;  // "evmc"
  std::uint32_t what = put;
  std::uint64_t offset = 0;  ///< in the receiver's part; of an answer: in what was asked for
  std::uint64_t bytes = 0;   ///< of this message; of a get: asked for
  std::uint64_t id = 0;      ///< of a get, and back with its answer
  std::uint64_t signals = none;
  std::uint64_t signal_offset = 0;
  std::uint64_t signal_value = 0;
};
static_assert(std::has_unique_object_representations_v<message_head>);

/// Carries puts and gets over a link and carries out those that come from other ranks. Everything
/// moves inside advance(), called again and again by one thread. Messages to one rank leave in the
/// order in which they were given, and are carried out in that order.
class courier {
 public:
  using clock = std::chrono::steady_clock;
  struct settings {
    device_id device;
    std::size_t chunk_bytes = 0;
    std::size_t chunks = 0;
  };
  courier(driver& on, std::shared_ptr<node_link> link, const own_parts& own, const settings& how);
  courier(const courier&) = delete;
  courier& operator=(const courier&) = delete;
  ~courier();

  /// A put that goes out piece by piece. Its source is free when `left` is 0.
  struct outgoing {
    std::vector<far_piece> pieces;
    std::size_t piece = 0;   ///< the first that is not wholly staged
    std::size_t staged = 0;  ///< bytes of it
    std::size_t left = 0;    ///< messages not handed to the link yet, and pieces not staged yet
    explicit outgoing(std::vector<far_piece> all) : pieces(std::move(all)), left(pieces.size()) {}
  };
  /// Stages what there is room for. True when anything moved.
  bool send(outgoing& put);

  /// Asks for bytes of another rank.
  struct incoming {
    rank_id from;
    std::size_t offset = 0;
    address into = 0;
    std::size_t bytes = 0;
    std::size_t received = 0;
    clock::time_point since = {};  ///< when the last bytes came
  };
  /// `get` stays until it is all received, or until the courier is destroyed.
  void ask(incoming& get);

  /// Moves everything that can be moved; true when anything was. Throws when the link or the driver
  /// fails, or a peer sends what cannot be.
  bool advance();
  /// Whether nothing is on its way from here.
  bool idle() const { return staged_.empty() && sending_.empty() && answers_.empty(); }
  /// Throws timed_out naming a rank that has not taken a message, or has put bytes where this
  /// rank's region does not reach, for so long.
  void check_deadlines(clock::time_point now, std::chrono::milliseconds patience) const;

  std::uint64_t messages_sent() const { return messages_sent_; }
  std::uint64_t messages_received() const { return messages_received_; }
  std::uint64_t bytes_received() const { return bytes_received_; }

 private:
  using counter = std::atomic<std::uint64_t>;
  struct parcel {  ///< on its way out
    rank_id to;
    std::optional<staging_chunk> chunk = std::nullopt;
    byte_vector alone = {};  ///< a head without bytes
    std::size_t size = 0;
    std::size_t* left = nullptr;
    node_link::transfer transfer = {};
    clock::time_point since = {};

    std::span<const std::byte> message() const {
      return chunk ? std::span<const std::byte>(chunk->at, size) : alone;
    }
  };
  struct delivery {  ///< on its way in
    rank_id from;
    std::optional<staging_chunk> chunk = std::nullopt;
    byte_vector alone = {};
    node_link::transfer transfer = {};
    bool complete = false;
    clock::time_point since = {};

    message_head head() const;
  };
  struct applied {  ///< copied out of its chunk soon
    staging_chunk chunk;
    incoming* get = nullptr;
    std::size_t bytes = 0;
  };
  struct answering {
    rank_id to;
    std::uint64_t id = 0;
    std::size_t offset = 0;
    std::size_t bytes = 0;
    std::size_t staged = 0;
  };

  /// Puts a message in line. Without a free chunk for its bytes nothing happens, and it is false.
  bool stage(rank_id to, message_head head, address from, std::size_t* left);
  bool post();
  bool finish_sends();
  bool answer();
  bool begin_receives();
  bool carry_out();
  bool finish_applied();
  /// False when it must wait for this rank's region to grow.
  bool apply(delivery& message);
  void apply_put(const message_head& head, delivery& message);
  void apply_answer(const message_head& head, delivery& message);
  const own_part& signalled(const message_head& head) const;
  bool reaches(const message_head& head) const;

  driver& on_;
  const std::shared_ptr<node_link> link_;
  const own_parts& own_;
  const std::size_t chunk_bytes_;
  staging out_;
  staging in_;
  scoped_event put_before_;  ///< a get reads what its rank put before
  std::deque<parcel> staged_;
  std::list<parcel> sending_;
  std::deque<answering> answers_;
  std::optional<node_link::arrival> arrival_;
  std::list<delivery> receiving_;
  std::deque<applied> applied_;
  std::map<std::uint64_t, incoming*> asked_;
  std::uint64_t next_id_ = 1;
  counter messages_sent_ = 0;
  counter messages_received_ = 0;
  counter bytes_received_ = 0;
};

}  // namespace evmm
