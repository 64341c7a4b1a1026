// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/rail.hpp"

#include <cstddef>
#include <vector>

namespace evmm::ep {

/// What a plan keeps of the nodes.
struct rail_plan {
  rail_plan() = default;
  rail_plan(heap_source& from, std::size_t max_tokens, std::size_t nodes)
      : places(make_places(from, max_tokens, nodes)), sent(nodes), came(nodes) {}
  symmetric_buffer<std::int32_t> places;  ///< [max_tokens][nodes]
  std::vector<std::size_t> sent, came;    ///< by node
  std::size_t own = 0;
};

/// What a counted_rail takes.
struct counted_rail_buffers {
  counted_rail_buffers(heap_source& from, const exchange_options& options, const job_shape& job);
  symmetric_buffer<std::int32_t> rank_map;
  rail_buffers rows;
  symmetric_buffer<std::int64_t> counts_out, counts_in;
  symmetric_buffer<float> weight_sums, weight_returns;
};

/// A rail over which as many tokens cross as there are: ep::exchange's.
///
/// Calls are collective and enqueue on the stream; gather() of a new plan waits on the CPU until
/// counts have crossed, since messages need them.
class counted_rail {
 public:
  /// As rail.
  counted_rail(symmetric_heap& heap, symmetric_channel& channel, const exchange_options& options,
               counted_rail_buffers buffers);

  std::size_t nodes() const { return way_.nodes(); }
  /// Throws what the channel broke with, if it did.
  void check() const { way_.channel().check(); }
  void check_call(native_stream stream) const { way_.check_call(stream); }
  /// This rank's tokens and those of its rail that have experts here, as tokens of the node, whose
  /// experts count in the order of its ranks. `again`: by a plan that is full.
  token_arrays gather(const token_arrays& given, rail_plan& plan, bool again, bool as_gradients,
                      native_stream stream);
  /// Where the node's sums of that batch go, and its gradients of weights.
  combine_output sums(bool with_weights) const;
  /// Returns them, and adds up what comes. What crosses is the same on all ranks, whichever of them
  /// want gradients of weights.
  void scatter(const rail_plan& plan, const combine_output& to, bool with_weights,
               native_stream stream);

 private:
  void exchange_counts(rail_plan& plan, native_stream stream);

  rail way_;
  counted_rail_buffers buffers_;
};

}  // namespace evmm::ep
