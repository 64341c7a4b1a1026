// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/choices.cuh"
#include "comm/ep/place_group.cuh"
#include "comm/ep/send_row.cuh"

#include <cstddef>
#include <cstdint>

// One step each way; host_low_latency_steps.cpp says the same in fewer words.

namespace evmm::ep {

constexpr int k_low_latency_warps = 16;  ///< of a dispatch's block, at most

/// Which part of a step a kernel does.
struct low_latency_parts {
  bool issue = false;
  bool wait = false;
};

/// What a dispatch's block keeps in shared memory beside its rows.
struct low_latency_shared {
  static __host__ __device__ int words(int tokens) { return (tokens + 31) / 32; }
  static std::size_t bytes(const ep_shape& shape, int tokens) {
    return static_cast<std::size_t>(tokens) * sizeof(std::uint64_t) +
           static_cast<std::size_t>(shape.ranks * words(tokens)) * sizeof(std::uint32_t);
  }
  std::uint64_t* masks;    ///< [tokens]
  std::uint32_t* columns;  ///< [ranks][words]: a bit for each token that goes there
  int count_words;

  __device__ low_latency_shared(char* at, int tokens)
      : masks(reinterpret_cast<std::uint64_t*>(at)),
        columns(reinterpret_cast<std::uint32_t*>(masks + tokens)),
        count_words(words(tokens)) {}
  /// How many of the tokens before t go to rank r.
  __device__ int before(int r, int t) const {
    const std::uint32_t* const column = columns + r * count_words;
    int rows = 0;
    for (int w = 0; w < t / 32; ++w) rows += __popc(column[w]);
    return t % 32 == 0 ? rows : rows + __popc(column[t / 32] & ((1u << t % 32) - 1));
  }
};

/// By a block that has waited for the rows, and found out who is dead: those may come yet, and
/// tell.
__device__ __forceinline__ void keep_source_rows(const ep_shape& shape,
                                                 const low_latency_slot& slot, std::uint64_t dead) {
  const auto* const told = shape.at<std::int32_t>(shape.rank, slot.told_rows);
  for_ranks(shape, [&](int r) { slot.source_rows[r] = is_dead(dead, r) ? 0 : __ldcg(told + r); });
}

/// Every block finds for itself where each token goes; each warp then takes token after token as in
/// send_kernel. Rows of this rank have places of their own at every peer.
__global__ void __launch_bounds__(k_low_latency_warps * 32)
    low_latency_dispatch_kernel(const __grid_constant__ ep_shape shape,
                                const __grid_constant__ low_latency_slot slot,
                                const __grid_constant__ token_arrays from,
                                const __grid_constant__ ep_totals totals, std::uint64_t* rounds,
                                low_latency_parts parts) {
  // What follows may be set up meanwhile.
  let_next_begin();
  extern __shared__ __align__(128) char shared[];
  const int warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint64_t dead = read_dead(slot.dead);
  std::uint64_t round = this_round(rounds);
  if (parts.issue) {
    const std::uint32_t given = shape.given_bytes();
    warp_row stage(shared, given);
    const low_latency_shared know(shared + static_cast<std::size_t>(warps) * (given + 8),
                                  from.count);
    const int first = static_cast<int>(blockIdx.x) + warp * static_cast<int>(gridDim.x);
    if (lane == 0) {
      stage.init();
      if (first < from.count) stage.load(from.x, first);  // wherever it goes
    }
    for (int t = static_cast<int>(threadIdx.x); t < from.count; t += static_cast<int>(blockDim.x)) {
      std::uint64_t mask = 0;
      for_choices(shape, from, t, [&](std::int64_t e) {
        if (e < shape.ranks * shape.local_experts) {
          mask |= std::uint64_t{1} << (static_cast<int>(e) / shape.local_experts);
        } else if (blockIdx.x == 0) {
          signal(totals.wrong_on_host, static_cast<std::uint64_t>(e) + 1);
        }
      });
      know.masks[t] = mask & ~dead;
      if (blockIdx.x == 0) slot.plan.masks[t] = mask & ~dead;
    }
    __syncthreads();
    for (int w = warp; w < know.count_words; w += warps) {
      const int t = w * 32 + lane;
      const std::uint64_t mask = t < from.count ? know.masks[t] : 0;
      for (int r = 0; r < shape.ranks; ++r) {
        const unsigned word = __ballot_sync(k_whole_warp, (mask >> r & 1) != 0);
        if (lane == 0) know.columns[r * know.count_words + w] = word;
      }
    }
    __syncthreads();
    if (blockIdx.x == 0) {
      for_ranks(shape, [&](int r) {
        if (is_dead(dead, r)) return;
        shape.at<std::int32_t>(r, slot.told_rows)[shape.rank] = know.before(r, from.count);
      });
    }

    for (int t = first; t < from.count; t += static_cast<int>(gridDim.x) * warps) {
      if (t != first) {
        bulk_wait_read();
        __syncwarp();
        if (lane == 0) stage.load(from.x, t);
      }
      row_belongings belongings(shape, from, t, lane);
      const std::uint64_t mask = know.masks[t];
      const rank_rows rows(shape, lane, [&](int r) {
        const int place = (mask >> r & 1) != 0 ? know.before(r, t) : -1;
        slot.plan.places[static_cast<std::size_t>(t) * shape.ranks + r] = place;
        return place < 0 ? -1 : shape.rank * slot.max_tokens + place;
      });
      stage.wait();
      belongings.store(shape, rows, stage.get());
    }
    bulk_wait_written();
    __syncthreads();
    if (threadIdx.x == 0) rounds[blockIdx.x] = round;
    tell_living(shape, flag_kind::rows, dead);
  } else {
    --round;  // that of the issue
  }
  if (parts.wait && blockIdx.x == 0) {
    keep_source_rows(shape, slot,
                     wait_for_living(shape, flag_kind::rows, totals, round, slot.dead));
  }
}

/// The layout by expert, a block an expert: waits for the rows, gives the choices of its expert
/// their rows and copies them.
__global__ void __launch_bounds__(k_low_latency_warps * 32)
    low_latency_arrange_kernel(const __grid_constant__ ep_shape shape,
                               const __grid_constant__ low_latency_slot slot,
                               const __grid_constant__ expert_layout to,
                               const __grid_constant__ ep_totals totals,
                               const std::uint64_t* dispatch_rounds) {
  wait_for_previous();
  extern __shared__ __align__(128) char shared[];
  const int warps = static_cast<int>(blockDim.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  warp_row stage(shared, shape.row_bytes);
  if (lane == 0) stage.init();
  const auto* const rounds = reinterpret_cast<const unsigned long long*>(dispatch_rounds);
  const std::uint64_t now =
      wait_for_living(shape, flag_kind::rows, totals, __ldcg(rounds), slot.dead);
  fence_bulk();  // rows that have come are loaded by bulk copies
  const auto* const told = shape.at<std::int32_t>(shape.rank, slot.told_rows);
  const place_range group = place_group(shape, to, static_cast<int>(blockIdx.x), [&](int place) {
    const int source = place / to.rows.stride;
    return !is_dead(now, source) && place % to.rows.stride < __ldcg(told + source);
  });
  if (blockIdx.x == 0) keep_source_rows(shape, slot, now);
  __syncthreads();  // row_places are there
  const char* const x = shape.at<char>(shape.rank, shape.x);
  const float* const scales = shape.at<float>(shape.rank, shape.scales);
  for (int i = static_cast<int>(threadIdx.x / 32); i < group.count; i += warps) {
    const auto row = static_cast<std::size_t>(group.begin + i);
    const int place = to.row_places[row];
    bulk_wait_read();
    __syncwarp();
    if (lane == 0) stage.load(x, place);
    for (int s = lane; s < shape.scale_count; s += 32) {
      to.scales[row * shape.scale_count + s] =
          scales[static_cast<std::size_t>(place) * shape.scale_count + s];
    }
    stage.wait();
    if (lane == 0) bulk_store(to.x + row * shape.row_bytes, stage.get(), shape.row_bytes);
    bulk_commit();
  }
  bulk_wait_written();
}

/// Tells the peers that this rank's combine buffer may be read.
__global__ void low_latency_ready_kernel(const __grid_constant__ ep_shape shape,
                                         const std::uint64_t* dead) {
  tell_living(shape, flag_kind::ready, read_dead(dead));
}

}  // namespace evmm::ep
