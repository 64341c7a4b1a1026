// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>

namespace [[gnu::visibility("default")]] evmm {

class symmetric_region;

/// Blocks that the ranks of a region send and receive together in stream order: the far part of a
/// channel's all_to_all_v, where a link has a better way than messages. One channel has it; the
/// region and the link outlive it.
///
/// Addresses: offsets in the parts of the region.
/// Threads: one at a time.
/// Streams: exchange() returns at once; drain() waits.
/// Errors: peer_error or timed_out naming the rank, at the call or by check().
class node_exchange {
 public:
  /// Bytes to or from one rank.
  struct block {
    rank_id peer;
    std::size_t at = 0;     ///< in this rank's part
    std::size_t bytes = 0;  ///< above 0
    std::size_t to = 0;     ///< in the peer's part, of what goes out: `at` of the block there
  };

  node_exchange() = default;
  node_exchange(const node_exchange&) = delete;
  node_exchange& operator=(const node_exchange&) = delete;
  /// Local.
  virtual ~node_exchange() = default;

  /// Which way the bytes go now, and why not a better one: for statistics and the log.
  virtual std::string way() const = 0;
  /// Work of the stream before it has written `out`, work after it may read `in` and write `out`
  /// anew. All ranks call it together, with blocks that match; a rank without blocks calls it too.
  /// No block is written before its receiver's stream got here.
  virtual void exchange(std::span<const block> out, std::span<const block> in,
                        native_stream stream) = 0;
  /// Throws what went wrong on a stream.
  virtual void check() {}
  /// Waits until the exchanges so far are over here. When they are on all ranks, nothing is under
  /// way any more.
  virtual void drain() {}
};

/// Blocks that one rank sends while another receives them, straight between memory that their
/// kernels reach: a channel's puts and gets of `least()` bytes or more, where a link has a better
/// way than messages for those. One channel has it, and the link outlives it.
///
/// Order: what one rank sends another comes in the order of the calls. A rank begins a receive when
///   its last one is over, and a send when the other has begun to receive: then transfers may wait
///   for each other in a queue, yet never in a circle.
/// Threads: one at a time, the channel's own.
/// Streams: while it works, streams of the program may be waiting for what it moves. So it calls
///   nothing that waits for them, such as the first launch of a kernel, which loads it.
/// Errors: of every member but give_up(), what went wrong with any transfer so far.
class large_transfers {
 public:
  /// One send or receive under way.
  enum class transfer : std::uint64_t {};

  large_transfers() = default;
  large_transfers(const large_transfers&) = delete;
  large_transfers& operator=(const large_transfers&) = delete;
  /// Local. Ends what is under way.
  virtual ~large_transfers() = default;

  /// Which way the bytes go: for statistics and the log.
  virtual std::string way() const = 0;
  virtual std::size_t least() const = 0;
  /// The most at a time. Others get their turn between two.
  virtual std::size_t most() const = 0;
  /// Starts to send what is complete behind an event.
  virtual transfer send(rank_id to, address from, std::size_t bytes, native_event after) = 0;
  /// Starts to receive to where nothing is written behind an event.
  virtual transfer receive(rank_id from, address into, std::size_t bytes, native_event after) = 0;
  /// Whether it is over. Asked until it is, and never again then.
  virtual bool done(transfer which) = 0;
  /// Ends all that is under way, wherever it stands; nothing else may be called afterwards.
  virtual void give_up() noexcept = 0;
  /// Collective, when nothing is under way on any rank: ends in good order, which may take less
  /// time than the destructor alone.
  virtual void close() {}
};

/// Moves bytes between ranks of different nodes, for one symmetric_channel at a time: over MPI,
/// between threads of one process, or over whatever else implements it. A channel that sent and was
/// not closed is its last: messages may be under way still, and would come to the next one.
///
/// What must be there: messages. Those from one rank to another arrive in the order in which they
///   were sent, and progress when either side calls anything here.
/// What may be there: a node_exchange and large_transfers, as NCCL has them.
///
/// Threads: the message members are called by one thread at a time, the channel's own; the make_
///   members and a node_exchange by the user's, at the same time.
/// Errors: peer_error for a peer that is lost, as far as the transport tells. Nothing waits, so
///   deadlines are the caller's.
class node_link {
 public:
  /// One send or receive under way.
  enum class transfer : std::uint64_t {};
  /// A message that began to arrive.
  struct arrival {
    rank_id from;
    std::size_t bytes = 0;
  };

  node_link() = default;
  node_link(const node_link&) = delete;
  node_link& operator=(const node_link&) = delete;
  virtual ~node_link() = default;

  /// "mpi", "threads": for messages and statistics.
  virtual std::string name() const = 0;

  /// Starts to send; `message` stays as it is until done(). At most 2 GiB.
  virtual transfer send(rank_id to, std::span<const std::byte> message) = 0;
  /// The next message that began to arrive, from any rank. It must be received before the next
  /// probe(), and receives of one rank's messages become done in any order.
  virtual std::optional<arrival> probe() = 0;
  /// Starts to receive what probe() told of; `into` is exactly as long.
  virtual transfer receive(std::span<std::byte> into) = 0;
  /// Whether it is over. Asked until it is, and never again then.
  virtual bool done(transfer which) = 0;

  /// Collective: what takes the far part of all_to_all_v over this region, on all ranks or none.
  /// Null where messages do.
  virtual std::unique_ptr<node_exchange> make_exchange(symmetric_region& region);
  /// Collective: what takes large puts and gets, on all ranks or none. Null where messages do.
  virtual std::unique_ptr<large_transfers> make_large_transfers(device_id device);

 protected:
  /// Of a link that goes: whether messages may still be under way to other ranks.
  bool left_behind() const noexcept { return held_; }

 private:
  friend class link_hold;
  std::atomic<bool> held_ = false;
};

/// Keeps a link for one user: two would take each other's messages.
class link_hold {
 public:
  /// Throws invalid_argument where somebody has it.
  explicit link_hold(std::shared_ptr<node_link> of);
  link_hold(const link_hold&) = delete;
  link_hold& operator=(const link_hold&) = delete;
  ~link_hold();
  /// What was sent may be under way still: nobody has it again.
  void leave_behind() noexcept { left_behind_ = true; }

 private:
  std::shared_ptr<node_link> link_;
  bool left_behind_ = false;
};

}  // namespace evmm
