// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bf16_pieces.cuh"
#include "comm/ep/bulk_copy.cuh"
#include "comm/ep/fp8.hpp"
#include "comm/ep/meet_peers.cuh"
#include "comm/ep/rank_rows.cuh"

#include <cuda_fp8.h>

#include <cstddef>
#include <cstdint>

// What a warp does with a token that it sends.

namespace evmm::ep {

constexpr int k_lane_scales = 8;  ///< of a row, in each lane of a warp
constexpr int k_send_warps = 30;  ///< of a block, at most

/// A row in shared memory for each warp of a block, then a barrier for each.
class warp_row {
 public:
  __device__ warp_row(char* shared, std::uint32_t row_bytes)
      : row_bytes_(row_bytes),
        row_(shared + threadIdx.x / 32 * static_cast<std::size_t>(row_bytes)),
        loaded_(reinterpret_cast<std::uint64_t*>(shared + blockDim.x / 32 *
                                                              static_cast<std::size_t>(row_bytes)) +
                threadIdx.x / 32) {}
  /// By one lane.
  __device__ void init() const {
    barrier_init(loaded_);
    fence_bulk();
  }
  /// Begins to load row t. By one lane; what was stored from it has been read.
  __device__ void load(const char* x, int t) const {
    barrier_expect(loaded_, row_bytes_);
    bulk_load(row_, x + static_cast<std::size_t>(t) * row_bytes_, row_bytes_, loaded_);
  }
  /// Until it is there. By all lanes.
  __device__ void wait() {
    barrier_wait(loaded_, phase_);
    phase_ ^= 1;
  }
  __device__ char* get() const { return row_; }

 private:
  std::uint32_t row_bytes_;
  char* row_;
  std::uint64_t* loaded_;
  std::uint32_t phase_ = 0;
};

/// A row of bf16 becomes one of e4m3, in its place or another, by a warp: lane l keeps the scales
/// of groups l, l + 32, ... of 128 elements. Half a warp has a group at a time, eight elements a
/// lane, and several at once.
__device__ __forceinline__ void quantize_row(const char* from, char* to, int groups, int lane,
                                             float (&scales)[k_lane_scales]) {
  constexpr int together = 4;
  const auto* const given = reinterpret_cast<const bf16_piece*>(from);
  auto* const made = reinterpret_cast<uint2*>(to);
#pragma unroll
  for (int i = 0; i < k_lane_scales; ++i) {
    for (int first = 0; first < 16 && 32 * i + 2 * first < groups; first += together) {
      bf16_piece pieces[together];
      float amax[together];
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const int pair = 16 * i + first + u;  // of groups
        amax[u] = k_least_amax;
        if (2 * pair + lane / 16 >= groups) continue;
        pieces[u] = given[pair * 32 + lane];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const float2 two = __bfloat1622float2(pieces[u].pairs[p]);
          amax[u] = fmaxf(amax[u], fmaxf(fabsf(two.x), fabsf(two.y)));
        }
      }
      for (int step = 8; step > 0; step /= 2) {
#pragma unroll
        for (int u = 0; u < together; ++u) {
          amax[u] = fmaxf(amax[u], __shfl_xor_sync(k_whole_warp, amax[u], step));
        }
      }
      __syncwarp();  // all have read what is overwritten
#pragma unroll
      for (int u = 0; u < together; ++u) {
        const int pair = 16 * i + first + u;
        const float even = __shfl_sync(k_whole_warp, amax[u], 0);
        const float odd = __shfl_sync(k_whole_warp, amax[u], 16);
        if (lane / 2 == first + u) scales[i] = (lane % 2 == 0 ? even : odd) / k_fp8_most;
        if (2 * pair + lane / 16 >= groups) continue;
        const float by = k_fp8_most / amax[u];
        __nv_fp8x2_storage_t fp8[4];
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          const float2 two = __bfloat1622float2(pieces[u].pairs[p]);
          fp8[p] = __nv_cvt_float2_to_fp8x2({two.x * by, two.y * by}, __NV_SATFINITE, __NV_E4M3);
        }
        made[pair * 32 + lane] = {fp8[0] | static_cast<unsigned>(fp8[1]) << 16,
                                  fp8[2] | static_cast<unsigned>(fp8[3]) << 16};
      }
      __syncwarp();
    }
  }
}

/// What belongs to a token's row, spread over the lanes of a warp.
class row_belongings {
 public:
  /// Fetches it.
  __device__ row_belongings(const ep_shape& shape, const token_arrays& from, int t, int lane)
      : t_(t), lane_(lane) {
    const auto token = static_cast<std::size_t>(t);
    if (lane < shape.top_k) {
      expert_ = from.ids[token * shape.top_k + lane];
      if (from.weights != nullptr) weight_ = from.weights[token * shape.top_k + lane];
    }
    for (int i = 0; i < k_lane_scales; ++i) {
      const int s = lane + 32 * i;
      if (s < shape.scale_count && !shape.quantize) {
        scales_[i] = from.scales[token * shape.scale_count + s];
      }
    }
  }
  /// Stores the row, once it is there, and what belongs to it at every rank that it goes to.
  __device__ void store(const ep_shape& shape, const rank_rows& rows, char* row_in_shared) {
    if (shape.quantize) {
      quantize_row(row_in_shared, row_in_shared, shape.scale_count, lane_, scales_);
      fence_bulk();
      __syncwarp();
    }
    rows.for_mine(shape, lane_, [&](int r, std::size_t row) {
      bulk_store(shape.at<char>(r, shape.x) + row * shape.row_bytes, row_in_shared,
                 shape.row_bytes);
    });
    bulk_commit();
    for (int r = 0; r < shape.ranks; ++r) {
      const int at = rows.of(r);
      if (at < 0) continue;
      const auto row = static_cast<std::size_t>(at);
      for (int k = 0; k < k_lane_scales; ++k) {
        const int s = lane_ + 32 * k;
        if (s < shape.scale_count) {
          shape.at<float>(r, shape.scales)[row * shape.scale_count + s] = scales_[k];
        }
      }
      if (lane_ < shape.top_k) {
        const std::int64_t local = expert_ - static_cast<std::int64_t>(r) * shape.local_experts;
        const bool here = local >= 0 && local < shape.local_experts;
        shape.at<std::int32_t>(r, shape.experts)[row * shape.top_k + lane_] =
            here ? static_cast<std::int32_t>(local) : -1;
        shape.at<float>(r, shape.weights)[row * shape.top_k + lane_] = here ? weight_ : 0;
      }
      if (lane_ == 0) shape.at<std::int32_t>(r, shape.tokens)[row] = t_;
    }
  }

 private:
  int t_;
  int lane_;
  std::int64_t expert_ = -1;
  float weight_ = 1;
  float scales_[k_lane_scales];
};

}  // namespace evmm::ep
