// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/heap_source.hpp"
#include "comm/ep/rail_steps.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/ep/exchange.hpp>

#include <cstddef>
#include <memory>
#include <vector>

namespace evmm::ep {

/// What both kinds of exchange tell their rails.
struct rail_options {
  const char* who = nullptr;  ///< for errors
  int experts = 0;
  int top_k = 0;
  std::size_t hidden = 0;
  payload rows = payload::bf16;
  bool quantize = false;
  std::size_t max_tokens = 0;
  token_record record(bool as_gradients = false) const;
};
template <class Options>
rail_options rail_options_of(const char* who, const Options& options) {
  return {.who = who,
          .experts = options.experts,
          .top_k = options.top_k,
          .hidden = options.hidden,
          .rows = options.rows,
          .quantize = options.quantize,
          .max_tokens = options.max_tokens};
}

/// What crosses between this rank and one of its rail.
struct rail_block {
  std::size_t from = 0;  ///< offset of what goes there
  std::size_t sent = 0;  ///< bytes
  std::size_t came = 0;
};

/// Throws unsupported, the same on every rank, for nodes that a rail cannot join.
void check_nodes(const char* who, const bootstrap& ranks);

/// A buffer of what crosses nodes, or of what the steps need for that.
template <class T>
symmetric_buffer<T> make_rail_buffer(heap_source& from, std::size_t count) {
  return from.make<T>(count, 4096);
}
/// Which record of each node's block a token is: [max_tokens][nodes].
inline symmetric_buffer<std::int32_t> make_places(heap_source& from, std::size_t max_tokens,
                                                  std::size_t nodes) {
  return make_rail_buffer<std::int32_t>(from, max_tokens * nodes);
}
/// node_map::node_of, then index_in.
inline symmetric_buffer<std::int32_t> make_rank_map(heap_source& from, int ranks) {
  return make_rail_buffer<std::int32_t>(from, 2 * static_cast<std::size_t>(ranks));
}

/// Memory of tokens on their way: [nodes][max_tokens] of each.
struct rail_buffers {
  rail_buffers(heap_source& from, const rail_options& options, std::size_t nodes,
               bool for_gradients);
  symmetric_buffer<std::byte> outgoing, incoming;  ///< records
  // The batch, what the node makes of it, and what comes back.
  symmetric_buffer<std::byte> x;
  symmetric_buffer<float> scales, weights;
  symmetric_buffer<std::int64_t> ids;
  symmetric_buffer<std::uint16_t> sums, returns;
  token_batch batch(const token_record& record) const {
    return {.x = reinterpret_cast<char*>(x.local()),
            .scales = record.scale_count > 0 ? scales.local() : nullptr,
            .ids = ids.local(),
            .weights = weights.local()};
  }
};

/// The way between nodes: a rank exchanges with the ranks of the other nodes that have its index
/// there (its rail). A token goes to each other node that has one of its experts, once; whoever has
/// it there sends it on within the node as one of its own. On the way back the node's sum returns
/// the same way.
///
/// counted_rail and fixed_rail say how.
class rail {
 public:
  /// Collective, after check_nodes().
  rail(symmetric_heap& heap, symmetric_channel& channel, const rail_options& options,
       symmetric_buffer<std::int32_t> rank_map);

  const rail_options& options() const { return options_; }
  const node_map& map() const { return map_; }
  std::size_t nodes() const { return peers_.size(); }
  std::size_t here() const { return static_cast<std::size_t>(map_.node); }
  symmetric_heap& heap() const { return heap_; }
  symmetric_channel& channel() const { return channel_; }
  driver& on() const { return heap_.region().on(); }
  rail_steps& steps() const { return *steps_; }
  record_blocks blocks(const symmetric_buffer<std::byte>& at, const token_record& record) const {
    return {reinterpret_cast<char*>(at.local()), record, static_cast<int>(options_.max_tokens)};
  }
  std::size_t sum_bytes() const { return options_.hidden * sizeof(std::uint16_t); }

  /// Before a call enqueues anything: throws what the channel broke with, if it did, and
  /// unsupported for a stream that is being captured.
  void check_call(native_stream stream) const;
  /// The tokens as they cross. Those that are to be quantised are first, into `own`: half as much
  /// crosses.
  token_arrays prepare(const token_arrays& given, const token_batch& own,
                       native_stream stream) const;
  /// Collective: sends its block to each other node, and receives theirs into blocks of `stride`
  /// bytes at offset `to`.
  void cross(const std::vector<rail_block>& by_node, std::size_t to, std::size_t stride,
             native_stream stream) const;

 private:
  symmetric_heap& heap_;
  symmetric_channel& channel_;
  rail_options options_;
  node_map map_;
  std::vector<rank_id> peers_;  ///< by node
  symmetric_buffer<std::int32_t> rank_map_;
  std::unique_ptr<rail_steps> steps_;
};

}  // namespace evmm::ep
