// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/channel_engine.hpp"
#include "comm/footprint.hpp"
#include "lib/memory/copier.hpp"
#include "lib/memory/device_scope.hpp"

#include <evmm/comm/symmetric_channel.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

namespace evmm {

struct symmetric_channel::state {
  state(symmetric_region& over, const channel_options& options);
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() { end_engine(false); }

  using word = channel_word;

  int size() const { return ranks.size(); }
  rank_id me() const { return ranks.rank(); }
  channel_path path(rank_id rank) const {
    if (rank == me()) return channel_path::local;
    return region.reachable(rank) ? channel_path::direct : channel_path::link;
  }

  /// While it lives, the default stream is that of the region's device.
  [[nodiscard]] device_scope enter() const { return {on, region.device()}; }
  /// What every call that enqueues something checks first.
  void check_call(native_stream stream);
  /// Throws why the channel is broken, if it is.
  void check_running();
  void check_open() const;
  void check_rank(rank_id rank) const;
  void check_span(std::string_view what, std::size_t offset, std::size_t bytes) const;
  void check_memory(std::string_view what, address at, std::size_t bytes) const;
  void check_signal(const signal_word& signal) const;

  void put(rank_id to, std::size_t offset, std::span<const std::byte> from,
           const std::optional<signal_word>& signal, native_stream stream);
  void get(rank_id from, std::size_t offset, std::span<std::byte> into, native_stream stream);
  void wait_signal(rank_id from, const signal_word& signal, native_stream stream);
  void barrier(native_stream stream);
  void all_to_all_v(std::span<const outgoing_block> out, std::span<const incoming_block> in,
                    native_stream stream);
  /// Reads what a change of the region leaves, the same on all ranks.
  void look_at_region();
  void close();
  /// Unless all ranks closed the channel, what this one sent may be under way still.
  void end_engine(bool everywhere) noexcept;
  channel_statistics statistics() const;

  /// One of the channel's own words in the part of `of`, which ranks of this node reach.
  address word_address(rank_id of, word kind, rank_id sender) const;
  std::size_t word_offset(word kind, rank_id sender) const;
  /// Stores `round` in this rank's word at each of `to`, which `choose` picks.
  template <class Choose>
  void announce(word kind, std::uint64_t round, native_stream stream, Choose&& choose);
  /// `name` is for the error if `from` does not announce.
  void wait_for_word(word kind, std::uint64_t round, rank_id from, std::string name,
                     native_stream stream);
  void check_blocks(std::span<const outgoing_block> out, std::span<const incoming_block> in) const;
  void compare_blocks(std::span<const outgoing_block> out, std::span<const incoming_block> in);
  void move_blocks(std::span<const outgoing_block> out, std::span<const incoming_block> in,
                   native_stream stream);
  /// Whether so much from or to an address goes by large_transfers.
  bool goes_large(address at, std::size_t bytes) const {
    return transfers != nullptr && bytes >= transfers->least() && on.kernels_reach(at);
  }
  /// Adds to the bytes of one path.
  void count(channel_path path, std::size_t bytes);
  /// Runs what must be done wholly or not at all: a failure breaks the channel, so that its peers
  /// are not left with half of it unnoticed. Comes after the last one, on whatever stream that was:
  /// words count upwards.
  template <class Body>
  void whole(native_stream stream, Body&& body);

  symmetric_region& region;
  driver& on;
  bootstrap& ranks;
  bool check_counts = false;
  std::shared_ptr<node_link> link;
  std::optional<link_hold> holds;
  std::unique_ptr<node_exchange> far;  ///< null where messages carry the far part of all_to_all_v
  std::shared_ptr<large_transfers> transfers;  ///< null where messages carry large puts and gets
  std::optional<symmetric_region> control;
  own_parts own;
  std::vector<segment> discarded;
  observer_subscription follows;
  std::optional<channel_engine> engine;  ///< goes first
  channel_statistics counts;
  std::uint64_t barriers = 0;
  std::uint64_t barrier_words = 0;
  std::uint64_t exchanges = 0;
  std::optional<scoped_event> latest;  ///< behind the last call of all ranks
  bool closed = false;
};

}  // namespace evmm
