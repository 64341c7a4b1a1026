// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"
#include "comm/ep/meet_peers.cuh"

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

/// The choices of a received row that have rows in the layout by expert, one after the other: lane
/// j of a warp knows the j-th, all lanes can ask.
class row_choices {
 public:
  /// By all lanes. `there` is whether the place holds a row.
  __device__ row_choices(const ep_shape& shape, const expert_layout& in, std::size_t place,
                         bool there, int lane) {
    int row = -1;
    float weight = 0;
    if (there && lane < shape.top_k) {
      const std::size_t at = place * shape.top_k + lane;
      const bool chosen = shape.at<std::int32_t>(shape.rank, shape.experts)[at] >= 0;
      row = in.expert_rows[at];  // fetched along, whatever it is
      weight = shape.at<float>(shape.rank, shape.weights)[at];
      if (!chosen) row = -1;
    }
    const unsigned some = __ballot_sync(k_whole_warp, row >= 0);
    count_ = __popc(some);
    choice_ = lane < count_ ? static_cast<int>(__fns(some, 0, lane + 1)) : 0;
    row_ = __shfl_sync(k_whole_warp, row, choice_);
    weight_ = __shfl_sync(k_whole_warp, weight, choice_);
  }
  __device__ int count() const { return count_; }
  // Of choice j; by all lanes.
  __device__ std::size_t row(int j) const {
    return static_cast<std::size_t>(__shfl_sync(k_whole_warp, row_, j));
  }
  __device__ float weight(int j) const { return __shfl_sync(k_whole_warp, weight_, j); }
  /// Which of the token's choices it is.
  __device__ int index(int j) const { return __shfl_sync(k_whole_warp, choice_, j); }

 private:
  int count_;
  int choice_;
  int row_;
  float weight_;
};

}  // namespace evmm::ep
