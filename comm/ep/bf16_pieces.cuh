// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_bf16.h>

#include <cstring>

namespace evmm::ep {

/// Eight elements, loaded and stored at once.
struct alignas(16) bf16_piece {
  __nv_bfloat162 pairs[4];
};

__device__ __forceinline__ bf16_piece load_piece(const __nv_bfloat16* from) {
  return *reinterpret_cast<const bf16_piece*>(from);
}
/// What another GPU wrote while this kernel ran: past the multiprocessor's cache.
__device__ __forceinline__ bf16_piece load_new_piece(const __nv_bfloat16* from) {
  const uint4 bits = __ldcg(reinterpret_cast<const uint4*>(from));
  bf16_piece piece;
  memcpy(&piece, &bits, sizeof(piece));
  return piece;
}
__device__ __forceinline__ void store_piece(__nv_bfloat16* to, const bf16_piece& piece) {
  *reinterpret_cast<bf16_piece*>(to) = piece;
}

__device__ __forceinline__ void add(float (&sum)[8], const bf16_piece& piece) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const float2 pair = __bfloat1622float2(piece.pairs[p]);
    sum[2 * p] += pair.x;
    sum[2 * p + 1] += pair.y;
  }
}
__device__ __forceinline__ void add_scaled(float (&sum)[8], const bf16_piece& piece, float by) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const float2 pair = __bfloat1622float2(piece.pairs[p]);
    sum[2 * p] = fmaf(pair.x, by, sum[2 * p]);
    sum[2 * p + 1] = fmaf(pair.y, by, sum[2 * p + 1]);
  }
}
__device__ __forceinline__ float dot_of(const bf16_piece& a, const bf16_piece& b) {
  float sum = 0;
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const float2 one = __bfloat1622float2(a.pairs[p]);
    const float2 other = __bfloat1622float2(b.pairs[p]);
    sum = fmaf(one.x, other.x, fmaf(one.y, other.y, sum));
  }
  return sum;
}
__device__ __forceinline__ bf16_piece to_piece(const float (&sum)[8]) {
  bf16_piece made;
#pragma unroll
  for (int p = 0; p < 4; ++p) made.pairs[p] = __floats2bfloat162_rn(sum[2 * p], sum[2 * p + 1]);
  return made;
}

}  // namespace evmm::ep
