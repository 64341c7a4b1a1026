// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/rail.hpp"

#include <cstddef>
#include <vector>

namespace evmm::ep {

/// What a plan keeps of the nodes.
struct rail_plan {
  symmetric_buffer<std::int32_t> places;  ///< [max_tokens][nodes]
  std::vector<std::size_t> sent, came;    ///< by node
  std::size_t own = 0;
};

/// A rail over which as many tokens cross as there are: ep::exchange's.
///
/// Calls are collective and enqueue on the stream; gather() of a new plan waits on the CPU until
/// counts have crossed, since messages need them.
class counted_rail {
 public:
  /// As rail.
  counted_rail(symmetric_heap& heap, symmetric_channel& channel, const exchange_options& options);

  std::size_t nodes() const { return way_.nodes(); }
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
  void exchange_counts(rail_plan& plan, native_stream stream);

  rail way_;
  rail_buffers buffers_;
  symmetric_buffer<std::int64_t> counts_out_, counts_in_;
  symmetric_buffer<float> weight_sums_, weight_returns_;
};

}  // namespace evmm::ep
