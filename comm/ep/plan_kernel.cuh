// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bulk_copy.cuh"
#include "comm/ep/choices.cuh"
#include "comm/ep/meet_peers.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>

// Where each token goes, told to the peers; host_steps.cpp says the same in fewer words.

namespace evmm::ep {

constexpr int k_plan_warps = 32;
constexpr int k_counting_blocks = 8;

/// Memory of the device, zero between plans.
struct expert_counts {
  int* chosen = nullptr;  ///< [experts]
  int* blocks_done = nullptr;
};

/// Each peer is told how many rows come; `word_of(r, i)` is word i of what rank r is told.
template <class Word>
__device__ __forceinline__ void tell_counts(const ep_shape& shape, const Word& word_of) {
  const int message = shape.count_words();
  for (int i = static_cast<int>(threadIdx.x); i < shape.ranks * message;
       i += static_cast<int>(blockDim.x)) {
    shape.count_message(i / message, shape.rank)[i % message] = word_of(i / message, i % message);
  }
  __syncthreads();
  tell_peers(shape, flag_kind::counts);
}

/// What the peers told becomes where this rank's rows begin, and what comes here.
__device__ __forceinline__ void learn_counts(const ep_shape& shape, const plan_arrays& to,
                                             const ep_totals& totals, std::uint64_t* rounds,
                                             std::uint64_t round) {
  wait_for_peers(shape, flag_kind::counts, totals, round);
  __syncthreads();
  const int thread = static_cast<int>(threadIdx.x);
  if (thread == 0) *rounds = round;
  const auto said = [&](int source, int word) {
    return __ldcg(shape.count_message(shape.rank, source) + word);
  };
  if (thread < shape.ranks) {
    int first = 0;
    int end = 0;
    for (int s = 0; s < shape.ranks; ++s) {
      if (shape.turn(thread, s) < shape.turn(thread, shape.rank)) first += said(s, thread);
      if (shape.turn(shape.rank, s) <= shape.turn(shape.rank, thread)) end += said(s, shape.rank);
    }
    to.first[thread] = first;
    totals.words[1 + thread] = end;
    if (shape.turn(shape.rank, thread) == shape.ranks - 1) totals.words[0] = end;
  }
  for (int e = thread; e < shape.local_experts; e += static_cast<int>(blockDim.x)) {
    int rows = 0;
    for (int s = 0; s < shape.ranks; ++s) rows += said(s, shape.ranks + e);
    totals.words[1 + shape.ranks + e] = rows;
  }
}

/// Shared memory of the plan's kernel.
struct plan_shared {
  std::size_t bytes = 0;
  bool masks = false;  ///< whether there is room for the tokens' masks
  plan_shared(const ep_shape& shape, int count, std::size_t most) {
    const auto ranks = static_cast<std::size_t>(shape.ranks);
    const std::size_t rows = (ranks * (k_plan_warps + 1) * sizeof(std::int32_t) + 7) / 8 * 8;
    const std::size_t wanted = static_cast<std::size_t>(count) * sizeof(std::uint64_t);
    masks = rows + wanted <= most;
    bytes = std::max(masks ? rows + wanted : rows,
                     ranks * static_cast<std::size_t>(shape.local_experts) * sizeof(std::int32_t));
  }
};

/// How often the tokens of all blocks but the first chose each expert: the many additions to few
/// words would take the one block that plans as long as all the rest of it.
__device__ __forceinline__ void count_choices(const ep_shape& shape, const token_arrays& from,
                                              const expert_counts& counts, std::int32_t* here) {
  const int experts = shape.ranks * shape.local_experts;
  const int thread = static_cast<int>(threadIdx.x);
  const int threads = static_cast<int>(blockDim.x);
  for (int e = thread; e < experts; e += threads) here[e] = 0;
  __syncthreads();
  for (int t = (static_cast<int>(blockIdx.x) - 1) * threads + thread; t < from.count;
       t += (static_cast<int>(gridDim.x) - 1) * threads) {
    for_choices(shape, from, t, [&](std::int64_t e) {
      if (e < experts) atomicAdd(&here[e], 1);
    });
  }
  __syncthreads();
  for (int e = thread; e < experts; e += threads) {
    if (here[e] != 0) atomicAdd(&counts.chosen[e], here[e]);
  }
  __threadfence();
  __syncthreads();
  if (thread == 0) atomicAdd(counts.blocks_done, 1);
}

/// The first block plans, the others count. Each warp takes a stretch of the tokens for one rank:
/// how many go there first, then, with the sums of the stretches before, the place of each.
__global__ void __launch_bounds__(k_plan_warps * 32)
    plan_kernel(const __grid_constant__ ep_shape shape, const __grid_constant__ token_arrays from,
                const __grid_constant__ plan_arrays to, const __grid_constant__ ep_totals totals,
                std::uint64_t* rounds, bool shared_masks,
                const __grid_constant__ expert_counts counts) {
  let_next_begin();
  extern __shared__ __align__(8) std::int32_t words[];
  if (blockIdx.x > 0) return count_choices(shape, from, counts, words);
  const std::uint64_t round = this_round(rounds);
  const int stretches = max(1, k_plan_warps / shape.ranks);
  std::int32_t* const stretch_rows = words;  // [ranks][stretches], at most ranks x k_plan_warps
  std::int32_t* const going = words + shape.ranks * k_plan_warps;  // [ranks]
  // Every token's mask is read once for each rank.
  std::uint64_t* const masks =
      shared_masks
          ? reinterpret_cast<std::uint64_t*>(words + (shape.ranks * (k_plan_warps + 1) + 1) / 2 * 2)
          : to.masks;
  const int threads = k_plan_warps * 32;
  const int thread = static_cast<int>(threadIdx.x);
  const int warp = thread / 32;
  const int lane = thread % 32;
  const int experts = shape.ranks * shape.local_experts;

  for (int t = thread; t < from.count; t += threads) {
    std::uint64_t mask = 0;
    for_choices(shape, from, t, [&](std::int64_t e) {
      if (e < experts) {
        mask |= std::uint64_t{1} << (static_cast<int>(e) / shape.local_experts);
      } else {
        signal(totals.wrong_on_host, static_cast<std::uint64_t>(e) + 1);
      }
    });
    masks[t] = mask;
    if (shared_masks) to.masks[t] = mask;
  }
  __syncthreads();

  const int pieces = shape.ranks * stretches;
  const int length = ((from.count + stretches - 1) / stretches + 31) / 32 * 32;
  for (int piece = warp; piece < pieces; piece += k_plan_warps) {
    const int r = piece / stretches;
    const int begin = piece % stretches * length;
    const int end = min(from.count, begin + length);
    int rows = 0;
    for (int t = begin + lane; t < end; t += 32) rows += static_cast<int>(masks[t] >> r & 1);
    rows = __reduce_add_sync(k_whole_warp, rows);
    if (lane == 0) stretch_rows[piece] = rows;
  }
  __syncthreads();
  if (thread < shape.ranks) {
    int rows = 0;
    for (int s = 0; s < stretches; ++s) {
      const int here = stretch_rows[thread * stretches + s];
      stretch_rows[thread * stretches + s] = rows;
      rows += here;
    }
    going[thread] = rows;
  }
  __syncthreads();

  // The peers wait for these; the places are worked out while they travel.
  if (thread == 0) {
    while (*static_cast<volatile int*>(counts.blocks_done) != static_cast<int>(gridDim.x) - 1) {
    }
    *counts.blocks_done = 0;  // for the next plan
    __threadfence();
  }
  __syncthreads();
  tell_counts(shape, [&](int r, int word) {
    const int expert = r * shape.local_experts + word - shape.ranks;
    const int said = word < shape.ranks ? going[word] : __ldcg(counts.chosen + expert);
    if (word >= shape.ranks) counts.chosen[expert] = 0;
    to.messages[r * shape.count_words() + word] = said;
    return said;
  });

  for (int piece = warp; piece < pieces; piece += k_plan_warps) {
    const int r = piece / stretches;
    const int begin = piece % stretches * length;
    const int end = min(from.count, begin + length);
    int before = stretch_rows[piece];
    for (int t = begin + lane; t - lane < end; t += 32) {
      const bool goes = t < end && (masks[t] >> r & 1) != 0;
      const unsigned all = __ballot_sync(k_whole_warp, goes);
      if (t < end) {
        to.places[static_cast<std::size_t>(t) * shape.ranks + r] =
            goes ? before + __popc(all & ((1u << lane) - 1)) : -1;
      }
      before += __popc(all);
    }
  }

  learn_counts(shape, to, totals, rounds, round);
}

__global__ void __launch_bounds__(k_plan_warps * 32)
    plan_again_kernel(const __grid_constant__ ep_shape shape,
                      const __grid_constant__ plan_arrays by,
                      const __grid_constant__ ep_totals totals, std::uint64_t* rounds) {
  let_next_begin();
  const std::uint64_t round = this_round(rounds);
  tell_counts(shape, [&](int r, int word) { return by.messages[r * shape.count_words() + word]; });
  learn_counts(shape, by, totals, rounds, round);
}

}  // namespace evmm::ep
