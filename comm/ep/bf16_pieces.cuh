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
/// Past the multiprocessor's cache: what is read once, or what another GPU wrote while the kernel
/// ran.
__device__ __forceinline__ bf16_piece load_piece_once(const __nv_bfloat16* from) {
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

constexpr int k_pieces_together = 2;  ///< of a row, by each lane
constexpr int k_rows_together = 4;
constexpr int k_elements_together = 32 * 8 * k_pieces_together;  ///< by a warp

/// Adds `count` rows, in order, at the elements i, i + 256, ... below `end` that are this lane's,
/// with many loads under way at once. `row_at(j)` and `weight_at(j)` are called by all lanes; a row
/// that is null is left out.
template <class RowAt, class WeightAt>
__device__ __forceinline__ void add_rows(float (&sum)[k_pieces_together][8], int count, int i,
                                         int end, const RowAt& row_at, const WeightAt& weight_at) {
  for (int first = 0; first < count; first += k_rows_together) {
    const __nv_bfloat16* rows[k_rows_together];
    bf16_piece pieces[k_rows_together][k_pieces_together];
#pragma unroll
    for (int j = 0; j < k_rows_together; ++j) {
      rows[j] = first + j < count ? row_at(first + j) : nullptr;
#pragma unroll
      for (int u = 0; u < k_pieces_together; ++u) {
        const int at = i + u * 32 * 8;
        if (rows[j] != nullptr && at < end) pieces[j][u] = load_piece_once(rows[j] + at);
      }
    }
#pragma unroll
    for (int j = 0; j < k_rows_together; ++j) {
      const float weight = weight_at(min(first + j, count - 1));
#pragma unroll
      for (int u = 0; u < k_pieces_together; ++u) {
        if (rows[j] != nullptr && i + u * 32 * 8 < end) add_scaled(sum[u], pieces[j][u], weight);
      }
    }
  }
}

/// Stores those elements.
__device__ __forceinline__ void store_sums(__nv_bfloat16* row,
                                           const float (&sum)[k_pieces_together][8], int i,
                                           int end) {
#pragma unroll
  for (int u = 0; u < k_pieces_together; ++u) {
    const int at = i + u * 32 * 8;
    if (at < end) store_piece(row + at, to_piece(sum[u]));
  }
}

}  // namespace evmm::ep
