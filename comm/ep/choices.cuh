// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <cstddef>
#include <cstdint>

// The experts that tokens chose, as the sender reads them and as the receiver does.

namespace evmm::ep {

/// Calls `visit(expert)` for each choice of a token that is one.
template <class Visit>
__device__ __forceinline__ void for_choices(const ep_shape& shape, const token_arrays& from, int t,
                                            Visit&& visit) {
  const std::int64_t* const ids = from.ids + static_cast<std::size_t>(t) * shape.top_k;
  for (int first = 0; first < shape.top_k; first += 8) {
    std::int64_t some[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) some[k] = first + k < shape.top_k ? ids[first + k] : -1;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (some[k] >= 0) visit(some[k]);
    }
  }
}

/// Whether a row was received at this place.
__device__ __forceinline__ bool has_row(const row_blocks& rows, int place) {
  return place % rows.stride < __ldg(rows.filled + place / rows.stride);
}

/// Calls `visit(k)` for each choice of the row that is `expert`.
template <class Visit>
__device__ __forceinline__ void for_choices_of(const std::int32_t* experts, int top_k, int expert,
                                               Visit&& visit) {
  for (int first = 0; first < top_k; first += 8) {
    std::int32_t some[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) some[k] = first + k < top_k ? experts[first + k] : -1;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (some[k] == expert) visit(first + k);
    }
  }
}

/// A row's choices, known to all lanes of a warp in turn.
struct row_choices {
  int row = -1;  ///< of the choice that is this lane's index
  float weight = 0;
  __device__ row_choices(const ep_shape& shape, const expert_layout& in, std::size_t place,
                         int lane) {
    if (lane >= shape.top_k) return;
    const std::size_t at = place * shape.top_k + lane;
    if (shape.at<std::int32_t>(shape.rank, shape.experts)[at] < 0) return;
    row = in.expert_rows[at];
    weight = shape.at<float>(shape.rank, shape.weights)[at];
  }
};

}  // namespace evmm::ep
