// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

namespace [[gnu::visibility("default")]] evmm {

/// Moves bytes between ranks of different nodes, for symmetric_channel: over MPI, between threads
/// of one process, or over whatever else implements it.
///
/// What must be there: messages. Those from one rank to another arrive in the order in which they
///   were sent, and progress when either side calls anything here.
/// What may be there: exchange(), bytes that all ranks send and receive in stream order, as NCCL
///   does it. A link that has it takes the far part of all_to_all_v that way.
///
/// Threads: the message members are called by one thread at a time, the channel's own; exchange()
///   by the user's, at the same time.
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
  /// Bytes to or from one rank.
  struct block {
    rank_id peer;
    address at = 0;
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

  /// Whether exchange() is there; the same on all ranks.
  virtual bool exchanges() const noexcept { return false; }
  /// Sends and receives in the order of `stream`: work before it has written `out`, work after it
  /// may read `in` and write `out` anew. All ranks call it together, with blocks that match; a rank
  /// without blocks calls it too. Memory is the region's. Throws unsupported unless exchanges().
  virtual void exchange(std::span<const block> out, std::span<const block> in,
                        native_stream stream);
};

}  // namespace evmm
