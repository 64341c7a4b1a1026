// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/meet_peers.cuh"

#include <cstddef>

namespace evmm::ep {

/// Where a token's row lies at each rank: lane r of a warp knows ranks r and r + 32.
class rank_rows {
 public:
  rank_rows() = default;
  /// `row_of(r)` for each rank, asked once.
  template <class RowOf>
  __device__ rank_rows(const ep_shape& shape, int lane, const RowOf& row_of) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int r = lane + 32 * i;
      if (r < shape.ranks) rows_[i] = row_of(r);
    }
  }
  /// By a plan; ranks whose bit is in `without` are left out.
  __device__ rank_rows(const ep_shape& shape, const plan_arrays& by, int t, int lane,
                       std::uint64_t without = 0)
      : rank_rows(
            shape, lane,
            planned{by.places + static_cast<std::size_t>(t) * shape.ranks, by.first, without}) {}
  /// The row at rank r, or -1. By all lanes.
  __device__ int of(int r) const {
    const int low = __shfl_sync(k_whole_warp, rows_[0], r % 32);
    const int high = __shfl_sync(k_whole_warp, rows_[1], r % 32);
    return r < 32 ? low : high;
  }
  /// How many ranks it goes to. By all lanes.
  __device__ int count() const {
    return __popc(__ballot_sync(k_whole_warp, rows_[0] >= 0)) +
           __popc(__ballot_sync(k_whole_warp, rows_[1] >= 0));
  }
  /// Calls `visit(r, row)` in the lane that knows rank r.
  template <class Visit>
  __device__ void for_mine(const ep_shape& shape, int lane, Visit&& visit) const {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (rows_[i] >= 0) visit(lane + 32 * i, static_cast<std::size_t>(rows_[i]));
    }
  }

 private:
  struct planned {
    const std::int32_t* places;
    const std::int32_t* first;
    std::uint64_t without;
    __device__ int operator()(int r) const {
      return places[r] < 0 || (without >> r & 1) != 0 ? -1 : first[r] + places[r];
    }
  };
  static constexpr int each = 2;
  static_assert(each * 32 == ep_shape::most_ranks);
  int rows_[each] = {-1, -1};
};

}  // namespace evmm::ep
