// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bf16_pieces.cuh"
#include "comm/ep/bulk_copy.cuh"
#include "comm/ep/cuda_combine.cuh"
#include "comm/ep/meet_peers.cuh"
#include "comm/ep/rank_rows.cuh"

#include <cstddef>
#include <cstdint>

namespace evmm::ep {

constexpr int k_combine_warps = 16;  ///< of a block, at most
constexpr int k_most_stages = 6;     ///< of a warp: one is summed while the others are loaded

/// Elements of a token that a warp sums at a time: the fewer, the more ranks there are, since a
/// stage holds those of all.
inline int combine_chunk(const ep_shape& shape) {
  return shape.ranks <= 8 ? 1024 : shape.ranks <= 16 ? 512 : 256;
}

/// Each warp takes chunk after chunk: loads it from every rank that the token went to, sums in FP32
/// and in the order of ranks, and stores the result. With `meeting.dead`, ranks that are dead are
/// left out, and the ranks do not meet at the end.
__global__ void __launch_bounds__(k_combine_warps * 32)
    combine_kernel(const __grid_constant__ ep_shape shape, int tokens, int pieces, int chunk,
                   int stages, const __grid_constant__ plan_arrays by,
                   const __grid_constant__ combine_output to,
                   const __grid_constant__ ep_totals totals, combine_meeting meeting,
                   std::uint64_t* rounds) {
  extern __shared__ __align__(128) char rows_loaded[];  // warps x stages, then their barriers
  auto* const out = static_cast<__nv_bfloat16*>(to.sums);
  const auto* const bias = static_cast<const __nv_bfloat16*>(to.bias);
  const std::uint64_t round = this_round(rounds);
  const int warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t chunk_bytes = static_cast<std::uint32_t>(chunk) * sizeof(__nv_bfloat16);
  const std::uint32_t stage_bytes = static_cast<std::uint32_t>(shape.ranks) * chunk_bytes;
  char* const mine = rows_loaded + static_cast<std::size_t>(warp * stages) * stage_bytes;
  auto* const loaded = reinterpret_cast<std::uint64_t*>(
                           rows_loaded + static_cast<std::size_t>(warps * stages) * stage_bytes) +
                       warp * stages;
  if (lane == 0) {
    for (int s = 0; s < stages; ++s) barrier_init(loaded + s);
    fence_bulk();
  }
  std::uint64_t dead = 0;
  if (meeting.dead == nullptr) {
    meet_at_the_beginning(shape, flag_kind::ready, totals, round);
  } else {
    if (meeting.tell && blockIdx.x == 0)
      tell_living(shape, flag_kind::ready, read_dead(meeting.dead));
    dead = wait_for_living(shape, flag_kind::ready, totals, round, meeting.dead);
  }
  fence_bulk();

  // The warp's part of the tokens, or of their pieces where there are few, chunk by chunk: `ahead`
  // is what is loaded next, what is summed now lies stages - 1 chunks behind it.
  const int chunks = ((shape.hidden + chunk - 1) / chunk + pieces - 1) / pieces;  // of a piece
  const int count = tokens * pieces;
  const int step = static_cast<int>(gridDim.x) * warps;
  struct cursor {
    int item;
    int chunk = 0;
    rank_rows rows = {};
  };
  const auto rows_of = [&](int item) {
    return item < count ? rank_rows(shape, by, item / pieces, lane, dead) : rank_rows();
  };
  const int first = static_cast<int>(blockIdx.x) * warps + warp;
  cursor ahead{first, 0, rows_of(first)};
  rank_rows upcoming = rows_of(first + step);  // fetched a token before it is needed
  const auto begin_of = [&](int item, int which) {
    return (item % pieces * chunks + which) * chunk;
  };
  const auto elements = [&](int begin) { return max(0, min(chunk, shape.hidden - begin)); };
  const auto load = [&](int stage) {
    if (ahead.item >= count) return;
    const int begin = begin_of(ahead.item, ahead.chunk);
    const auto bytes = static_cast<std::uint32_t>(elements(begin) * sizeof(__nv_bfloat16));
    const int loads = ahead.rows.count();
    if (lane == 0) {
      fence_bulk();
      barrier_expect(loaded + stage, static_cast<std::uint32_t>(loads) * bytes);
    }
    __syncwarp();
    ahead.rows.for_mine(shape, lane, [&](int r, std::size_t row) {
      if (bytes == 0) return;
      bulk_load(mine + static_cast<std::uint32_t>(stage) * stage_bytes +
                    static_cast<std::uint32_t>(r) * chunk_bytes,
                shape.at<__nv_bfloat16>(r, shape.y) + row * shape.hidden + begin, bytes,
                loaded + stage);
    });
    if (++ahead.chunk < chunks) return;
    ahead = {ahead.item + step, 0, upcoming};
    upcoming = rows_of(ahead.item + step);
  };
  for (int s = 0; s < stages - 1; ++s) load(s);
  std::uint32_t phases = 0;  // a bit a stage
  int stage = 0;
  std::uint64_t next_mask = first < count ? by.masks[first / pieces] : 0;
  for (int item = first; item < count; item += step) {
    const std::uint64_t mask = next_mask & ~dead;
    if (item + step < count) next_mask = by.masks[(item + step) / pieces];
    for (int c = 0; c < chunks; ++c) {
      __syncwarp();  // all lanes have read what the next load overwrites
      load(stage == 0 ? stages - 1 : stage - 1);
      barrier_wait(loaded + stage, phases >> stage & 1);
      phases ^= 1u << stage;
      const char* const rows = mine + static_cast<std::uint32_t>(stage) * stage_bytes;
      const int in_row = begin_of(item, c);
      const std::size_t begin = static_cast<std::size_t>(item / pieces) * shape.hidden + in_row;
      for (int i = lane * 8; i < elements(in_row); i += 32 * 8) {
        float sum[8] = {};
        if (bias != nullptr) add(sum, load_piece(bias + begin + i));
        for (std::uint64_t left = mask; left != 0; left &= left - 1) {
          const int r = __ffsll(static_cast<long long>(left)) - 1;
          add(sum, *reinterpret_cast<const bf16_piece*>(
                       rows + static_cast<std::uint32_t>(r) * chunk_bytes +
                       static_cast<std::size_t>(i) * sizeof(__nv_bfloat16)));
        }
        store_piece(out + begin + i, to_piece(sum));
      }
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
  }
  if (to.weight_gradients != nullptr) {
    for (int t = first; t < tokens; t += step) {
      const rank_rows rows(shape, by, t, lane);
      const std::size_t at = static_cast<std::size_t>(t) * shape.top_k + lane;
      const std::int64_t expert = lane < shape.top_k ? to.ids[at] : -1;
      const bool chosen = expert >= 0 && expert < shape.ranks * shape.local_experts;
      const int r = chosen ? static_cast<int>(expert) / shape.local_experts : 0;
      const int row = rows.of(r);
      if (lane >= shape.top_k) continue;
      to.weight_gradients[at] = chosen ? __ldcg(shape.at<float>(r, shape.weight_gradients) +
                                                static_cast<std::size_t>(row) * shape.top_k + lane)
                                       : 0;
    }
  }
  if (meeting.dead == nullptr) {
    meet_at_the_end(shape, flag_kind::finished, totals, rounds, round);
  } else if (threadIdx.x == 0) {
    rounds[blockIdx.x] = round;
  }
}

}  // namespace evmm::ep
