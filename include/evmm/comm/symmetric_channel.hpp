// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/node_link.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace [[gnu::visibility("default")]] evmm {

/// How bytes get to a rank.
enum class channel_path : std::uint8_t {
  local,   ///< this rank itself
  direct,  ///< through the mapping of its memory: ranks of this node
  link,    ///< by a node_link: ranks of other nodes. In messages, staged in page-locked memory, or
           ///< as the link has better ways: channel_statistics tells which
};
/// "local", "direct", "link".
const char* to_string(channel_path path) noexcept;

/// A 64-bit word of a region, by its symmetric offset, and what is stored there or waited for.
/// Words count upwards; DEVICE words are the fast ones.
struct signal_word {
  std::size_t offset = 0;  ///< a multiple of 8
  std::uint64_t value = 0;
};

/// What a symmetric_channel is made from.
struct channel_options {
  /// How to get to other nodes, for this channel alone; null for the bootstrap's own way
  /// (bootstrap::make_link). Not asked for where all ranks share a node.
  std::shared_ptr<node_link> link = nullptr;
  /// Page-locked staging memory for other nodes: this much at a time, `chunks` times for sending
  /// and as often for receiving.
  std::size_t chunk_bytes = std::size_t{1} << 20;
  std::size_t chunks = 8;
  /// Let large puts and gets go by the link's large_transfers, where it has them. What those cost
  /// (communicators, on NCCL) is saved without.
  bool large = true;
  /// Where the channel's own signals lie: one granule of each rank.
  tier signals = tier::device;
  /// Let all_to_all_v compare what ranks send and expect before anything moves. Costs a collective
  /// step of the bootstrap, which blocks the caller; equal on all ranks.
  bool check_counts = false;
};

/// Counts of this rank since construction.
struct channel_statistics {
  std::uint64_t local_bytes = 0;  ///< put or got, by path
  std::uint64_t direct_bytes = 0;
  std::uint64_t link_bytes = 0;
  std::uint64_t link_messages = 0;  ///< sent, requests and answers too
  std::uint64_t link_messages_received = 0;
  std::uint64_t link_bytes_received = 0;  ///< put here, or got, by ranks of other nodes
  std::string link;                       ///< its name; empty where all ranks share a node
  std::string exchange;  ///< which way the far part of all_to_all_v goes; empty: in messages
  std::string large;     ///< which way large puts and gets to other nodes go; likewise
  std::uint64_t large_bytes = 0;  ///< went that way, of link_bytes
};

/// What all_to_all_v sends to one rank.
struct outgoing_block {
  std::size_t from = 0;  ///< offset in this rank's part
  std::size_t to = 0;    ///< offset in the receiver's part
  std::size_t bytes = 0;
};
/// What all_to_all_v receives from one rank.
struct incoming_block {
  std::size_t at = 0;  ///< offset in this rank's part: the sender's `to`
  std::size_t bytes = 0;
};

/// One-sided traffic between the parts of a symmetric region, in stream order: by copies and stores
/// into the peer's mapping within a node; across nodes by messages that the peer's channel carries
/// out for it, or receives by the link's large_transfers. The target calls nothing for it.
///
/// Addresses: symmetric offsets of the region, on the other side; a change of the region needs no
///   new channel. What is put is there at the latest after a signal to the same rank, or a barrier,
///   that came after it; so before shrink, migrate or discard take memory that was put to, call
///   barrier and name its stream in `uses`.
/// Units: bytes; signals are 64-bit words.
/// Threads: one thread at a time. Across nodes a thread of the channel's own moves the bytes.
/// Streams: every call returns at once and does its work in the order of the stream. A source may
///   be written anew, and a destination read, by later work of the stream. The calls of all ranks
///   together come one after the other, as they are made, whatever their streams. The default
///   stream is that of the region's device. A captured stream is unsupported.
/// Errors: invalid_argument at the call for offsets, words and ranks that cannot be. What goes
///   wrong later breaks the channel: check(), synchronize() and every later call throw peer_error
///   or timed_out naming the rank. A rank that does not signal, answer or take messages within the
///   bootstrap's timeout, counted from when the stream got there, is lost. A stream cannot fail, so
///   it is let go on past its waits, which then stand for nothing: look at check() before trusting
///   what a stream did. Each wait on CUDA holds a hardware queue: with more streams than
///   CUDA_DEVICE_MAX_CONNECTIONS (8), one stream's wait may hold up another. While a stream waits,
///   what blocks inside CUDA may hold up the thread that moves the bytes, and so wait for ever: a
///   copy from or to pageable memory, or the first launch of a kernel, which loads it
///   (CUDA_MODULE_LOADING=EAGER loads all at once). Call synchronize() before.
class symmetric_channel {
 public:
  /// Collective over all ranks of the region, which outlives the channel and does not move. Throws
  /// unsupported when ranks of other nodes are there and no link to them; invalid_argument for
  /// options that cannot be.
  explicit symmetric_channel(symmetric_region& region, const channel_options& options = {});
  symmetric_channel(symmetric_channel&&) noexcept;
  symmetric_channel& operator=(symmetric_channel&&) noexcept;
  /// Local: gives up what is under way, and lets streams go that wait for it. Those that come to
  /// their calls later would find nobody, and memory that is gone; their page-locked words are left
  /// to the process.
  ~symmetric_channel();

  /// Collective: waits until all calls so far are carried out on all ranks, then ends the channel;
  /// later calls are an invalid_argument, but for region() and statistics(). Throws what check()
  /// throws, ended all the same.
  void close();

  symmetric_region& region() const noexcept;
  /// Which way a rank is reached.
  channel_path path_to(rank_id rank) const;
  channel_statistics statistics() const;

  /// Copies `from`, any memory that this rank's device reaches, to `offset` of a rank's part.
  void put(rank_id to, std::size_t offset, std::span<const std::byte> from, native_stream stream);
  /// The same, and then stores a word there: whoever sees it sees the bytes, and all that this rank
  /// put to that rank in the order of the stream before.
  void put_signal(rank_id to, std::size_t offset, std::span<const std::byte> from,
                  signal_word signal, native_stream stream);
  /// Only the word.
  void signal(rank_id to, signal_word signal, native_stream stream);
  /// Copies from `offset` of a rank's part. What that rank wrote is seen when it was signalled.
  void get(rank_id from, std::size_t offset, std::span<std::byte> into, native_stream stream);
  /// Later work of the stream waits until this rank's word is at least the value, which `from` will
  /// store: it is the one to be named if it does not.
  void wait_signal(rank_id from, signal_word signal, native_stream stream);
  /// Collective: later work of each rank's stream comes after all earlier work of all ranks'
  /// streams, and what that put is there, whoever put it wherever.
  void barrier(native_stream stream);
  /// Collective: every rank sends a block to every rank, itself too. `out` and `in` are by rank and
  /// match: what rank a sends to b is what b receives from a, at the place that b names. Blocks of
  /// 0 bytes are free. No block is written before its receiver's stream got here.
  void all_to_all_v(std::span<const outgoing_block> out, std::span<const incoming_block> in,
                    native_stream stream);

  /// Throws why the channel is broken, if it is.
  void check() const;
  /// Waits for the work of a stream, then check().
  void synchronize(native_stream stream);

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm
