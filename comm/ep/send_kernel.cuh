// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bulk_copy.cuh"
#include "comm/ep/fp8.hpp"
#include "comm/ep/meet_peers.cuh"
#include "comm/ep/rank_rows.cuh"

#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

namespace evmm::ep {

constexpr int k_lane_scales = 8;  ///< of a row, in each lane of a warp
constexpr int k_send_warps = 30;  ///< of a block, at most

/// A row of bf16 in shared memory becomes one of e4m3 in its place, by a warp: lane l keeps the
/// scales of groups l, l + 32, ... of 128 elements.
__device__ __forceinline__ void quantize_row(char* row, int groups, int lane,
                                             float (&scales)[k_lane_scales]) {
  for (int i = 0; i < k_lane_scales; ++i) {
    for (int g = 32 * i; g < min(groups, 32 * i + 32); ++g) {
      const auto* const pairs = reinterpret_cast<const __nv_bfloat162*>(row) + g * 64 + lane * 2;
      const float2 low = __bfloat1622float2(pairs[0]);
      const float2 high = __bfloat1622float2(pairs[1]);
      float amax = fmaxf(fmaxf(fabsf(low.x), fabsf(low.y)), fmaxf(fabsf(high.x), fabsf(high.y)));
      for (int step = 16; step > 0; step /= 2) {
        amax = fmaxf(amax, __shfl_xor_sync(k_whole_warp, amax, step));
      }
      amax = fmaxf(amax, k_least_amax);
      const float by = k_fp8_most / amax;
      if (lane == g % 32) scales[i] = amax / k_fp8_most;
      const auto two = [&](float a, float b) {
        return __nv_cvt_float2_to_fp8x2({a * by, b * by}, __NV_SATFINITE, __NV_E4M3);
      };
      const ushort2 made{two(low.x, low.y), two(high.x, high.y)};
      __syncwarp();  // all have read what is overwritten
      reinterpret_cast<ushort2*>(row)[g * 32 + lane] = made;
      __syncwarp();
    }
  }
  fence_bulk();
  __syncwarp();
}

/// Each warp takes token after token: its row into shared memory once, and from there to every rank
/// that it goes to, while its lanes store what belongs to the row.
__global__ void __launch_bounds__(k_send_warps * 32)
    send_kernel(const __grid_constant__ ep_shape shape, const __grid_constant__ token_arrays from,
                const __grid_constant__ plan_arrays by, const __grid_constant__ ep_totals totals,
                std::uint64_t* rounds, std::uint64_t ticket) {
  extern __shared__ __align__(128) char stages[];  // a row for each warp, then their barriers
  const int warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t given = shape.given_bytes();
  char* const stage = stages + static_cast<std::size_t>(warp) * given;
  auto* const loaded =
      reinterpret_cast<std::uint64_t*>(stages + static_cast<std::size_t>(warps) * given) + warp;
  const auto load = [&](int t) {
    barrier_expect(loaded, given);
    bulk_load(stage, from.x + static_cast<std::size_t>(t) * given, given, loaded);
  };
  const std::uint64_t round = this_round(rounds);
  const int first = static_cast<int>(blockIdx.x) * warps + warp;
  if (lane == 0) {
    barrier_init(loaded);
    fence_bulk();
    if (first < from.count) load(first);  // wherever it goes
  }
  asm volatile("griddepcontrol.wait;" ::: "memory");
  if (blockIdx.x == gridDim.x - 1) tell_host(shape, totals, ticket);

  std::uint32_t phase = 0;
  for (int t = first; t < from.count; t += static_cast<int>(gridDim.x) * warps) {
    const auto token = static_cast<std::size_t>(t);
    if (t != first) {
      bulk_wait_read();
      __syncwarp();
      if (lane == 0) load(t);
    }
    // All that is known of the token is fetched while its row is.
    const rank_rows rows(shape, by, t, lane);
    std::int64_t expert = -1;
    float weight = 1;
    if (lane < shape.top_k) {
      expert = from.ids[token * shape.top_k + lane];
      if (from.weights != nullptr) weight = from.weights[token * shape.top_k + lane];
    }
    float scales[k_lane_scales];
    for (int i = 0; i < k_lane_scales; ++i) {
      const int s = lane + 32 * i;
      if (s < shape.scale_count && !shape.quantize) {
        scales[i] = from.scales[token * shape.scale_count + s];
      }
    }
    barrier_wait(loaded, phase);
    phase ^= 1;
    if (shape.quantize) quantize_row(stage, shape.scale_count, lane, scales);
    rows.for_mine(shape, lane, [&](int r, std::size_t row) {
      bulk_store(shape.at<char>(r, shape.x) + row * shape.row_bytes, stage, shape.row_bytes);
    });
    bulk_commit();
    for (int r = 0; r < shape.ranks; ++r) {
      const int at = rows.of(r);
      if (at < 0) continue;
      const auto row = static_cast<std::size_t>(at);
      for (int k = 0; k < k_lane_scales; ++k) {
        const int s = lane + 32 * k;
        if (s < shape.scale_count) {
          shape.at<float>(r, shape.scales)[row * shape.scale_count + s] = scales[k];
        }
      }
      if (lane < shape.top_k) {
        const std::int64_t local = expert - static_cast<std::int64_t>(r) * shape.local_experts;
        const bool here = local >= 0 && local < shape.local_experts;
        shape.at<std::int32_t>(r, shape.experts)[row * shape.top_k + lane] =
            here ? static_cast<std::int32_t>(local) : -1;
        shape.at<float>(r, shape.weights)[row * shape.top_k + lane] = here ? weight : 0;
      }
      if (lane == 0) shape.at<std::int32_t>(r, shape.tokens)[row] = t;
    }
  }
  bulk_wait_written();
  meet_at_the_end(shape, flag_kind::rows, totals, rounds, round);
}

}  // namespace evmm::ep
