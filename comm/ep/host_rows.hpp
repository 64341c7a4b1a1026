// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <span>
#include <vector>

namespace evmm::ep {

/// A bit for each rank that a token goes to; an expert that there is not is told to the host.
std::uint64_t ranks_of(const ep_shape& shape, const token_arrays& from, int t,
                       const ep_totals& totals);

/// e4m3 [128 x scales] of bf16 as much, with a scale for each 128 elements.
void quantize_row(const void* row, char* made, std::span<float> scales);

/// A token's row as it is sent, quantised when that is asked for; what send_row.cuh does.
class host_row {
 public:
  explicit host_row(const ep_shape& shape);
  void load(const token_arrays& from, int t);
  /// As row `to` of rank r, with what belongs to it.
  void store(const token_arrays& from, int t, int r, std::size_t to) const;

 private:
  const ep_shape& shape_;
  std::vector<char> row_;
  std::vector<float> scales_;
};

/// Sums, for each token, its rows in the ranks' combine buffers, but those of ranks whose bit is in
/// `without`.
void host_combine(const ep_shape& shape, int count, const plan_arrays& by, const combine_output& to,
                  std::uint64_t without = 0);

}  // namespace evmm::ep
