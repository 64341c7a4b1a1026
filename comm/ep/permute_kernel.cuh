// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bf16_pieces.cuh"
#include "comm/ep/choices.cuh"
#include "comm/ep/send_row.cuh"

#include <climits>

#include <cstddef>
#include <cstdint>

// The layout by expert, made on the rank itself from what it received, and the way back.

namespace evmm::ep {

constexpr int k_place_warps = 32;
constexpr int k_permute_warps = 16;
constexpr int k_unpermute_warps = 16;

/// A block an expert. Each warp takes a stretch of the places: counts the choices there first,
/// then, with the sums of the stretches before, gives each its row.
__global__ void __launch_bounds__(k_place_warps * 32)
    place_kernel(const __grid_constant__ ep_shape shape, const __grid_constant__ expert_layout to) {
  __shared__ int before_stretch[k_place_warps + 1];
  __shared__ int before_expert;
  const int expert = static_cast<int>(blockIdx.x);
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const auto* const experts = shape.at<std::int32_t>(shape.rank, shape.experts);
  const int places = to.rows.places();
  const int length = ((places + k_place_warps - 1) / k_place_warps + 31) / 32 * 32;
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
    if (!has_row(to.rows, place)) continue;
    for_choices_of(choices_at(place), shape.top_k, expert, [&](int) { ++mine; });
  }
  mine = __reduce_add_sync(k_whole_warp, mine);
  if (lane == 0) before_stretch[warp] = mine;
  __syncthreads();
  if (warp == 0) {
    int sum = before_stretch[lane];
    const int own = sum;
    for (int step = 1; step < 32; step *= 2) {
      const int other = __shfl_up_sync(k_whole_warp, sum, step);
      if (lane >= step) sum += other;
    }
    before_stretch[lane] = sum - own;
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
  // Groups of a fixed size have room for every token once.
  const int most = to.stride == 0 ? INT_MAX : begin + to.stride;
  const int count = min(before_stretch[k_place_warps], most - begin);
  const int end = begin + padded(count);
  if (thread == 0) {
    to.begin[expert] = begin;
    if (expert == shape.local_experts - 1) {
      to.begin[expert + 1] = end;
      raise(to.most_rows_on_host, static_cast<std::uint64_t>(end));
    }
    if (to.stride != 0) to.expert_tokens[expert] = count;
  }
  for (int row = begin + count + thread; row < end; row += static_cast<int>(blockDim.x)) {
    to.row_experts[row] = -1;
  }

  int next = begin + before_stretch[warp];
  for (int first = warp * length; first < stretch_end; first += 32) {
    const int place = first + lane;
    const bool there = place < stretch_end && has_row(to.rows, place);
    int here = 0;
    if (there) for_choices_of(choices_at(place), shape.top_k, expert, [&](int) { ++here; });
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
      if (fits) to.row_experts[row] = expert;
      to.expert_rows[static_cast<std::size_t>(place) * shape.top_k + k] = fits ? row++ : -1;
    });
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
  warp_rows stage(shared, shape.row_bytes);
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
    const row_choices choices(shape, from, place, lane);
    const unsigned some = __ballot_sync(k_whole_warp, choices.row >= 0);
    const int begin = item % pieces * length;
    const int end = min(shape.hidden, begin + length);
    for (int first = begin; first < end; first += 32 * 8) {
      const int i = first + lane * 8;
      float sum[8] = {};
      for (unsigned left = some; left != 0; left &= left - 1) {
        const int k = __ffs(static_cast<int>(left)) - 1;
        const auto row = static_cast<std::size_t>(__shfl_sync(k_whole_warp, choices.row, k));
        const float weight = weighted ? __shfl_sync(k_whole_warp, choices.weight, k) : 1.0f;
        if (i < end) add_scaled(sum, load_piece(made + row * shape.hidden + i), weight);
      }
      if (i < end) store_piece(y + place * shape.hidden + i, to_piece(sum));
    }
  }
}

/// Each warp takes place after place.
__global__ void __launch_bounds__(k_unpermute_warps * 32)
    permute_gradients_kernel(const __grid_constant__ ep_shape shape,
                             const __grid_constant__ expert_layout to,
                             const __nv_bfloat16* outputs) {
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
    const row_choices choices(shape, to, place, lane);
    for (int k = 0; k < shape.top_k; ++k) {
      const int at = __shfl_sync(k_whole_warp, choices.row, k);
      float dot = 0;
      if (at >= 0) {
        const auto row = static_cast<std::size_t>(at) * shape.hidden;
        const float weight = __shfl_sync(k_whole_warp, choices.weight, k);
        for (int i = lane * 8; i < shape.hidden; i += 32 * 8) {
          const bf16_piece piece = load_piece(y + place * shape.hidden + i);
          float scaled[8] = {};
          add_scaled(scaled, piece, weight);
          store_piece(gradients + row + i, to_piece(scaled));
          if (outputs != nullptr) dot += dot_of(piece, load_piece(outputs + row + i));
        }
        for (int step = 16; step > 0; step /= 2) dot += __shfl_xor_sync(k_whole_warp, dot, step);
      }
      if (outputs != nullptr && lane == 0) {
        to.weight_gradients[place * shape.top_k + k] = dot;
      }
    }
  }
}

}  // namespace evmm::ep
