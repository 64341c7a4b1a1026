// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/message_head.hpp"
#include "comm/rendezvous.hpp"
#include "comm/staging.hpp"
#include "comm/wire.hpp"
#include "lib/memory/copier.hpp"

#include <evmm/comm/node_link.hpp>
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

/// Carries puts and gets over a link and carries out those that come from other ranks. Everything
/// moves inside advance(), called again and again by one thread. Messages to one rank leave in the
/// order in which they were given, and are carried out in that order. What is large goes by a
/// rendezvous, where there are large_transfers.
class courier {
 public:
  using clock = std::chrono::steady_clock;
  struct settings {
    device_id device;
    std::size_t chunk_bytes = 0;
    std::size_t chunks = 0;
  };
  /// Without `large` everything goes in messages.
  courier(driver& on, std::shared_ptr<node_link> link, std::shared_ptr<large_transfers> large,
          const own_parts& own, const settings& how);
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

  /// Asks for bytes of another rank; `get` stays until it is all received, or until the courier is
  /// destroyed.
  void ask(far_get& get);

  /// Moves everything that can be moved; true when anything was. Throws when the link or the driver
  /// fails, or a peer sends what cannot be.
  bool advance();
  /// Whether nothing is on its way from here.
  bool idle() const {
    return staged_.empty() && sending_.empty() && answers_.empty() && (!large_ || large_->idle());
  }
  /// Throws timed_out naming a rank that has not taken a message, or has put bytes where this
  /// rank's region does not reach, for so long; and tells ranks that wait for this one to be busy.
  void keep_time(clock::time_point now, std::chrono::milliseconds patience);
  /// Ends what no destructor of this process could: nothing else may be called afterwards.
  void give_up() noexcept;

  std::uint64_t messages_sent() const { return messages_sent_; }
  std::uint64_t messages_received() const { return messages_received_; }
  std::uint64_t bytes_received() const {
    return bytes_received_ + (large_ ? large_->bytes_received() : 0);
  }

 private:
  using counter = std::atomic<std::uint64_t>;
  struct parcel {  ///< on its way out
    rank_id to;
    std::optional<staging_chunk> chunk = std::nullopt;
    byte_vector alone = {};  ///< a head without bytes
    std::size_t size = 0;
    std::size_t* left = nullptr;
    std::optional<node_link::transfer> transfer = std::nullopt;  ///< once the link has it
    clock::time_point since = {};

    std::span<const std::byte> message() const {
      return chunk ? std::span<const std::byte>(chunk->at, size) : alone;
    }
  };
  struct delivery {  ///< on its way in
    rank_id from;
    std::optional<staging_chunk> chunk = std::nullopt;
    byte_vector alone = {};
    std::optional<node_link::transfer> transfer = std::nullopt;
    bool complete = false;
    clock::time_point since = {};

    message_head head() const;
  };
  struct applied {  ///< copied out of its chunk soon
    staging_chunk chunk;
    far_get* get = nullptr;
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
  void take_over(delivery& message, address to, std::size_t bytes, far_get* get);
  void apply_put(const message_head& head, delivery& message);
  void apply_answer(const message_head& head, delivery& message);
  bool apply_large(const message_head& head, rank_id from);

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
  std::map<std::uint64_t, far_get*> asked_;
  std::uint64_t next_id_ = 1;
  counter messages_sent_ = 0;
  counter messages_received_ = 0;
  counter bytes_received_ = 0;
  std::optional<rendezvous> large_;
};

}  // namespace evmm
