// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/rail.hpp"
#include "lib/memory/copier.hpp"
#include "lib/memory/scoped_stream.hpp"

#include <evmm/ep/low_latency.hpp>

#include <array>
#include <cstddef>
#include <optional>

namespace evmm::ep {

/// What a fixed_rail takes: two sets, as low_latency_exchange has.
struct fixed_rail_buffers {
  static constexpr std::size_t k_sets = 2;
  struct buffer_set {
    buffer_set(heap_source& from, const low_latency_options& options, std::size_t nodes);
    rail_buffers rows;
    symmetric_buffer<std::int32_t> places;
  };
  fixed_rail_buffers(heap_source& from, const low_latency_options& options, const job_shape& job);
  symmetric_buffer<std::int32_t> rank_map;
  std::array<buffer_set, k_sets> sets;
};

/// A rail over which no count is awaited: every token of a rank has a place in each block, by its
/// index, and of each block as many places cross as the ranks agree on. low_latency_exchange's.
///
/// What waits for other nodes does so on a stream of the rail's own, call by call in the order in
/// which they are made: the user's go on meanwhile, until join(). Of two sets of buffers, as
/// low_latency_exchange's: they may be used again after join().
class fixed_rail {
 public:
  static constexpr std::size_t k_sets = fixed_rail_buffers::k_sets;

  /// As rail.
  fixed_rail(symmetric_heap& heap, symmetric_channel& channel, const low_latency_options& options,
             fixed_rail_buffers buffers);
  fixed_rail(const fixed_rail&) = delete;
  fixed_rail& operator=(const fixed_rail&) = delete;

  std::size_t nodes() const { return way_.nodes(); }
  /// Tokens of a batch, [nodes][max_tokens].
  int batch_size() const { return static_cast<int>(nodes() * way_.options().max_tokens); }
  native_stream own_stream() const { return own_->get(); }

  /// Throws what the channel broke with, if it did.
  void check() const { way_.channel().check(); }
  void check_call(native_stream stream) const { way_.check_call(stream); }

  /// This rank's tokens, which `stream` may write anew, and those of its rail that have experts
  /// here, as tokens of the node, whose experts count in the order of its ranks. `most` of each
  /// block cross. On the own stream from there on.
  token_arrays gather(int set, const token_arrays& given, std::size_t most, native_stream stream);
  /// The own stream goes on behind what `stream` has done so far.
  void follow(native_stream stream);
  /// Where the node's sums of a batch go, and from where they return, on the own stream.
  combine_output sums(int set) const { return {.sums = of(set).rows.sums.local()}; }
  void scatter(int set, std::size_t most);
  /// What join() waits for.
  void mark(int set);
  /// `stream` goes on behind what the own one had done at mark().
  void join(int set, native_stream stream);
  /// Adds up what the nodes made of this rank's tokens.
  void add(int set, int count, const combine_output& to, native_stream stream);

 private:
  using buffer_set = fixed_rail_buffers::buffer_set;
  const buffer_set& of(int set) const { return buffers_.sets[static_cast<std::size_t>(set)]; }
  native_event done(int set) const { return done_[static_cast<std::size_t>(set)]->get(); }
  std::size_t own_row() const { return way_.here() * way_.options().max_tokens; }
  /// The first `most` places of a block to each node, and of one from each.
  template <class T>
  void cross(const symmetric_buffer<T>& from, const symmetric_buffer<T>& to, std::size_t most);

  rail way_;
  fixed_rail_buffers buffers_;
  std::array<std::optional<scoped_event>, k_sets> done_;
  std::optional<scoped_event> given_;
  std::optional<scoped_stream> own_;
};

}  // namespace evmm::ep
