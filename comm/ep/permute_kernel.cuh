// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bf16_pieces.cuh"
#include "comm/ep/choices.cuh"
#include "comm/ep/place_group.cuh"
#include "comm/ep/send_row.cuh"

#include <cstddef>
#include <cstdint>

// The layout by expert, made on the rank itself from what it received, and the way back.

namespace evmm::ep {

constexpr int k_permute_warps = 16;
constexpr int k_unpermute_warps = 16;

/// A block an expert.
__global__ void __launch_bounds__(k_place_warps * 32)
    place_kernel(const __grid_constant__ ep_shape shape, const __grid_constant__ expert_layout to) {
  const place_range group = place_group(shape, to, static_cast<int>(blockIdx.x),
                                        [&](int place) { return has_row(to.rows, place); });
  if (threadIdx.x == 0 && group.expert == shape.local_experts - 1) {
    to.begin[shape.local_experts] = group.end;
    raise(to.most_rows_on_host, static_cast<std::uint64_t>(group.end));
  }
}

/// Each warp takes place after place: its row into shared memory once, and from there to the row of
/// every choice.
__global__ void __launch_bounds__(k_permute_warps * 32)
    permute_kernel(const __grid_constant__ ep_shape shape,
                   const __grid_constant__ expert_layout to) {
  extern __shared__ __align__(128) char shared[];
  const int warps = static_cast<int>(blockDim.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  warp_row stage(shared, shape.row_bytes);
  if (lane == 0) stage.init();
  __syncwarp();
  const char* const x = shape.at<char>(shape.rank, shape.x);
  const float* const scales = shape.at<float>(shape.rank, shape.scales);
  const auto* const experts = shape.at<std::int32_t>(shape.rank, shape.experts);
  const int places = to.rows.places();
  for (int p = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x / 32);
       p < places; p += static_cast<int>(gridDim.x) * warps) {
    if (!has_row(to.rows, p)) {
      if (to.rows.blocks == 1) break;
      continue;
    }
    const auto place = static_cast<std::size_t>(p);
    bulk_wait_read();
    __syncwarp();
    if (lane == 0) stage.load(x, p);
    int row = -1;
    if (lane < shape.top_k && experts[place * shape.top_k + lane] >= 0) {
      row = to.expert_rows[place * shape.top_k + lane];
    }
    for (int s = lane; s < (shape.scale_count + 31) / 32 * 32; s += 32) {
      const bool there = s < shape.scale_count;
      const float scale = there ? scales[place * shape.scale_count + s] : 0;
      for (int k = 0; k < shape.top_k; ++k) {
        const int at = __shfl_sync(k_whole_warp, row, k);
        if (there && at >= 0)
          to.scales[static_cast<std::size_t>(at) * shape.scale_count + s] = scale;
      }
    }
    stage.wait();
    if (row >= 0) {
      bulk_store(to.x + static_cast<std::size_t>(row) * shape.row_bytes, stage.get(),
                 shape.row_bytes);
    }
    bulk_commit();
  }
  bulk_wait_written();
}

/// Each warp takes piece after piece of the places' rows. Sums are FP32, in the order of choices.
__global__ void __launch_bounds__(k_unpermute_warps * 32)
    unpermute_kernel(const __grid_constant__ ep_shape shape,
                     const __grid_constant__ expert_layout from, int pieces, bool weighted) {
  const int warps = static_cast<int>(blockDim.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  auto* const y = shape.at<__nv_bfloat16>(shape.rank, shape.y);
  const auto* const made = reinterpret_cast<const __nv_bfloat16*>(from.y);
  const int items = from.rows.places() * pieces;
  const int length = (shape.hidden / 8 + pieces - 1) / pieces * 8;
  for (int item = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32; item < items;
       item += static_cast<int>(gridDim.x) * warps) {
    if (!has_row(from.rows, item / pieces)) {
      if (from.rows.blocks == 1) break;
      continue;
    }
    const auto place = static_cast<std::size_t>(item / pieces);
    const row_choices choices(shape, from, place, true, lane);
    const int begin = item % pieces * length;
    const int end = min(shape.hidden, begin + length);
    for (int first = begin; first < end; first += k_elements_together) {
      const int i = first + lane * 8;
      float sum[k_pieces_together][8] = {};
      add_rows(
          sum, choices.count(), i, end, [&](int j) { return made + choices.row(j) * shape.hidden; },
          [&](int j) { return weighted ? choices.weight(j) : 1.0f; });
      store_sums(y + place * shape.hidden, sum, i, end);
    }
  }
}

/// Each warp takes place after place: its gradient once for up to eight choices.
__global__ void __launch_bounds__(k_unpermute_warps * 32)
    permute_gradients_kernel(const __grid_constant__ ep_shape shape,
                             const __grid_constant__ expert_layout to,
                             const __nv_bfloat16* outputs) {
  constexpr int together = 8;
  const int warps = static_cast<int>(blockDim.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const auto* const y = shape.at<__nv_bfloat16>(shape.rank, shape.y);
  auto* const gradients = reinterpret_cast<__nv_bfloat16*>(to.y);
  const int places = to.rows.places();
  for (int p = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32; p < places;
       p += static_cast<int>(gridDim.x) * warps) {
    if (!has_row(to.rows, p)) {
      if (to.rows.blocks == 1) break;
      continue;
    }
    const auto place = static_cast<std::size_t>(p);
    const row_choices choices(shape, to, place, true, lane);
    float of_choice = 0;  // the gradient of the weight that is this lane's index
    for (int first = 0; first < choices.count(); first += together) {
      const int count = min(together, choices.count() - first);
      std::size_t rows[together];
      float weights[together];
      float dots[together] = {};
#pragma unroll
      for (int j = 0; j < together; ++j) {
        rows[j] = choices.row(min(first + j, choices.count() - 1)) * shape.hidden;
        weights[j] = choices.weight(min(first + j, choices.count() - 1));
      }
      for (int i = lane * 8; i < shape.hidden; i += 32 * 8) {
        const bf16_piece piece = load_piece_once(y + place * shape.hidden + i);
#pragma unroll
        for (int j = 0; j < together; ++j) {
          if (j >= count) break;
          float scaled[8] = {};
          add_scaled(scaled, piece, weights[j]);
          store_piece(gradients + rows[j] + i, to_piece(scaled));
          if (outputs != nullptr) {
            dots[j] += dot_of(piece, load_piece_once(outputs + rows[j] + i));
          }
        }
      }
      if (outputs == nullptr) continue;
#pragma unroll
      for (int j = 0; j < together; ++j) {
        if (j >= count) break;
        for (int step = 16; step > 0; step /= 2) {
          dots[j] += __shfl_xor_sync(k_whole_warp, dots[j], step);
        }
        if (lane == choices.index(first + j)) of_choice = dots[j];
      }
    }
    if (outputs != nullptr && lane < shape.top_k) {
      to.weight_gradients[place * shape.top_k + lane] = of_choice;
    }
  }
}

}  // namespace evmm::ep
