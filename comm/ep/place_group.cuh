// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/choices.cuh"
#include "comm/ep/meet_peers.cuh"

#include <cstddef>
#include <cstdint>

namespace evmm::ep {

constexpr int k_place_warps = 32;  ///< of a block, at most

/// The rows of an expert's group.
struct place_range {
  int expert;
  int begin;
  int count;
  int end;  ///< padding included
};

/// Gives each choice of an expert its row, by a block. `there(place)` is whether a row was received
/// at a place. Each warp takes a stretch of the places: counts the choices there first, then, with
/// the sums of the stretches before, gives each its row.
template <class There>
__device__ __forceinline__ place_range place_group(const ep_shape& shape, const expert_layout& to,
                                                   int expert, const There& there) {
  __shared__ int before_stretch[k_place_warps + 1];
  __shared__ int before_expert;
  const int thread = static_cast<int>(threadIdx.x);
  const int warps = static_cast<int>(blockDim.x / 32);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const auto* const experts = shape.at<std::int32_t>(shape.rank, shape.experts);
  const int places = to.rows.places();
  const int length = ((places + warps - 1) / warps + 31) / 32 * 32;
  const int stretch_end = min(places, (warp + 1) * length);
  const auto choices_at = [&](int place) {
    return experts + static_cast<std::size_t>(place) * shape.top_k;
  };
  const auto padded = [&](int rows) {
    return (rows + to.alignment - 1) / to.alignment * to.alignment;
  };

  if (thread == 0) before_expert = 0;
  int mine = 0;
  for (int place = warp * length + lane; place < stretch_end; place += 32) {
    if (!there(place)) continue;
    for_choices_of(choices_at(place), shape.top_k, expert, [&](int) { ++mine; });
  }
  mine = __reduce_add_sync(k_whole_warp, mine);
  if (lane == 0) before_stretch[warp] = mine;
  __syncthreads();
  if (warp == 0) {
    const int own = lane < warps ? before_stretch[lane] : 0;
    int sum = own;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(k_whole_warp, sum, step);
      if (lane >= step) sum += other;
    }
    if (lane < warps) before_stretch[lane] = sum - own;
    if (lane == 31) before_stretch[k_place_warps] = sum;
  }
  // Packed groups begin behind those of the experts before, which the totals count.
  if (to.stride == 0) {
    for (int e = thread; e < expert; e += static_cast<int>(blockDim.x)) {
      atomicAdd(&before_expert, padded(to.expert_tokens[e]));
    }
  }
  __syncthreads();
  const int begin = to.stride == 0 ? before_expert : expert * to.stride;
  // Groups of a fixed size have room for every token once, packed ones for all that was told: what
  // is counted here may be more when a rank did not come.
  const int most = to.stride == 0 ? to.capacity - (to.alignment - 1) : begin + to.stride;
  const int count = min(before_stretch[k_place_warps], most - begin);
  const int end = begin + padded(count);
  if (thread == 0) {
    to.begin[expert] = begin;
    if (to.stride != 0) to.expert_tokens[expert] = count;
  }
  for (int row = begin + count + thread; row < end; row += static_cast<int>(blockDim.x)) {
    to.row_experts[row] = -1;
    to.row_places[row] = -1;
  }

  int next = begin + before_stretch[warp];
  for (int first = warp * length; first < stretch_end; first += 32) {
    const int place = first + lane;
    int here = 0;
    if (place < stretch_end && there(place)) {
      for_choices_of(choices_at(place), shape.top_k, expert, [&](int) { ++here; });
    }
    int sum = here;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(k_whole_warp, sum, step);
      if (lane >= step) sum += other;
    }
    int row = next + sum - here;
    next += __shfl_sync(k_whole_warp, sum, 31);
    if (here == 0) continue;
    for_choices_of(choices_at(place), shape.top_k, expert, [&](int k) {
      const bool fits = row < most;
      if (fits) {
        to.row_experts[row] = expert;
        to.row_places[row] = place;
      }
      to.expert_rows[static_cast<std::size_t>(place) * shape.top_k + k] = fits ? row++ : -1;
    });
  }
  return {expert, begin, count, end};
}

}  // namespace evmm::ep
