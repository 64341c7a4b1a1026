// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/message_head.hpp"
#include "lib/memory/copier.hpp"

#include <evmm/comm/node_link.hpp>
#include <evmm/driver.hpp>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>

namespace evmm {

/// Large puts and gets: who receives says when. The sender of a put asks to send (a get needs no
/// asking); the receiver takes one at a time, in pieces and by turns, begins to receive each and
/// clears its sender to send; when all of a put is there it stores the signal and says so. All of
/// it by heads of messages, which the courier carries, in the order of its other messages.
///
/// Members are called by one thread. Throws what the transfers fail with; peer_error for what
/// cannot be.
class rendezvous {
 public:
  using clock = far_get::clock;
  using sender = std::function<void(rank_id, const message_head&)>;

  /// Puts of other ranks are carried out on `in`, behind which this rank's part holds what they put
  /// before. Keeps references to `on` and `own`.
  rendezvous(driver& on, device_id device, std::shared_ptr<large_transfers> by,
             const own_parts& own, native_stream in, sender say);

  /// Starts to put; `left` is one more until all of it is there.
  void put(const far_piece& piece, std::size_t& left);
  /// Starts to get; it stays until it is all received.
  void get(far_get& wanted);

  /// Heads that came, whose offsets this rank's part reaches.
  void on_request_to_send(rank_id from, const message_head& head);
  void on_clear_to_send(rank_id from, const message_head& head);
  void on_received(rank_id from, const message_head& head);
  void on_in_line(rank_id from);

  /// True when anything moved.
  bool advance();
  bool idle() const {
    return asked_.empty() && in_line_.empty() && !receiving_ && sending_.empty();
  }
  /// Tells ranks whose puts are in line, or that wait for what is sent to others before, that it
  /// comes nearer, four times within what they bear without an answer: however many there are, they
  /// wait as long as the line moves.
  void reassure(clock::time_point now, std::chrono::milliseconds patience);
  /// Throws timed_out naming a rank whose turn it has been for so long.
  void check_deadlines(clock::time_point now, std::chrono::milliseconds patience) const;
  /// Nothing else may be called afterwards.
  void give_up() noexcept { by_->give_up(); }

  std::uint64_t bytes_received() const { return bytes_received_; }

 private:
  struct request {  ///< a put of this rank that is not all there yet
    far_piece piece;
    std::size_t* left = nullptr;
    clock::time_point since;
  };
  struct arrival {  ///< what this rank is to receive
    rank_id from;
    address into = 0;
    message_head head;       ///< of a put: the request; of a get: what clears the owner to send
    far_get* get = nullptr;  ///< null for a put
    std::size_t received = 0;
  };
  struct piece {
    arrival of;
    std::size_t bytes = 0;
    large_transfers::transfer transfer{};
    clock::time_point since;
  };
  struct departure {
    rank_id to;
    std::size_t bytes = 0;
    large_transfers::transfer transfer{};
    clock::time_point since;
    clock::time_point reassured;  ///< its receiver was
    bool nearer = false;          ///< since then one ahead of it is over
  };

  native_event behind_earlier_puts();
  request& asked(rank_id of, const message_head& head);
  void begin_receive();
  void finish_receive();

  driver& on_;
  const own_parts& own_;
  native_stream in_;
  sender say_;
  scoped_event put_before_;
  std::map<std::uint64_t, request> asked_;  ///< by id
  std::uint64_t next_id_ = 1;
  std::deque<arrival> in_line_;
  std::optional<piece> receiving_;
  std::list<departure> sending_;
  bool moved_on_ = false;  ///< a piece was received since the last reassurance
  clock::time_point reassured_ = {};
  std::atomic<std::uint64_t> bytes_received_ = 0;
  const std::shared_ptr<large_transfers> by_;
};

}  // namespace evmm
