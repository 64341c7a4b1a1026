// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/rail_steps.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/ep/exchange.hpp>

#include <cstddef>
#include <memory>
#include <vector>

namespace evmm::ep {

/// What a plan keeps of the nodes.
struct rail_plan {
  symmetric_buffer<std::int32_t> places;  ///< [max_tokens][nodes]
  std::vector<std::size_t> sent, came;    ///< by node
  std::size_t own = 0;
};

/// The way between nodes: a rank exchanges with the ranks of the other nodes that have its index
/// there (its rail). A token goes to each other node that has one of its experts, once; whoever has
/// it there sends it on within the node as one of its own. On the way back the node's sum returns
/// the same way.
///
/// Calls are collective and enqueue on the stream; gather() of a new plan waits on the CPU until
/// counts have crossed, since messages need them.
class rail {
 public:
  /// Collective. Throws unsupported when the nodes have different numbers of ranks.
  rail(symmetric_heap& heap, symmetric_channel& channel, const exchange_options& options);

  int nodes() const { return map_.nodes; }
  rail_plan make_plan() const;
  /// This rank's tokens and those of its rail that have experts here, as tokens of the node, whose
  /// experts count in the order of its ranks. `again`: by a plan that is full.
  token_arrays gather(const token_arrays& given, rail_plan& plan, bool again, bool as_gradients,
                      native_stream stream);
  /// Where the node's sums of that batch go.
  combine_output sums(const combine_output& wanted) const;
  /// Returns them, and adds up what comes.
  void scatter(const rail_plan& plan, const combine_output& to, native_stream stream);

 private:
  rank_id peer(int node) const { return peers_[static_cast<std::size_t>(node)]; }
  void exchange_counts(rail_plan& plan, native_stream stream);
  /// Sends a block to each node and receives one from each: [nodes][max_tokens] of `bytes_each`.
  void cross(const std::vector<std::size_t>& from, std::size_t to, std::size_t bytes_each,
             const std::vector<std::size_t>& sent, const std::vector<std::size_t>& came,
             native_stream stream);
  token_record record_of(bool as_gradients) const;

  symmetric_heap& heap_;
  symmetric_channel& channel_;
  exchange_options options_;
  node_map map_;
  std::vector<rank_id> peers_;  ///< by node
  symmetric_buffer<std::int32_t> ranks_;
  symmetric_buffer<std::int64_t> counts_out_, counts_in_;
  symmetric_buffer<std::byte> outgoing_, incoming_, x_;
  symmetric_buffer<float> scales_, weights_, weight_sums_, weight_returns_;
  symmetric_buffer<std::int64_t> ids_;
  symmetric_buffer<std::uint16_t> sums_, returns_;
  std::unique_ptr<rail_steps> steps_;
};

}  // namespace evmm::ep
