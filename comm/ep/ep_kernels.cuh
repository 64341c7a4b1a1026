// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bulk_copy.cuh"
#include "comm/ep/ep_shape.hpp"

#include <cuda_bf16.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

// The steps of an exchange on a GPU. host_steps.cpp says the same in fewer words.

namespace evmm::ep {

constexpr int k_plan_warps = 32;
constexpr int k_lane_scales = 8;  ///< of a row, in each lane of a warp
constexpr unsigned k_whole_warp = 0xffffffffu;

// --- meeting the peers ---------------------------------------------------------------------------

__device__ __forceinline__ std::uint64_t nanoseconds_now() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// Thread r of the first `ranks` tells rank r. What the block wrote before it synchronised, and
/// what it has seen of others, is visible to whoever sees the flag.
__device__ __forceinline__ void tell_peers(const ep_shape& shape, flag_kind kind) {
  if (threadIdx.x < static_cast<unsigned>(shape.ranks)) {
    signal_add(shape.flag(static_cast<int>(threadIdx.x), kind, shape.rank), 1);
  }
}

/// Thread r of the first `ranks` waits for rank r, as long as the timeout allows.
__device__ __forceinline__ void wait_for_peers(const ep_shape& shape, flag_kind kind,
                                               const ep_totals& totals, std::uint64_t round) {
  if (threadIdx.x < static_cast<unsigned>(shape.ranks)) {
    const std::uint64_t* flag = shape.flag(shape.rank, kind, static_cast<int>(threadIdx.x));
    const std::uint64_t goal = shape.goal(kind, round);
    const std::uint64_t begin = nanoseconds_now();
    while (read_signal(flag) < goal) {
      if (nanoseconds_now() - begin > shape.timeout_ns) {
        atomicOr_system(reinterpret_cast<unsigned long long*>(totals.lost_on_host),
                        1ull << threadIdx.x);
        break;
      }
    }
  }
}

/// The end of a kernel: each block tells the peers that it is done, and the first one stays until
/// theirs are.
__device__ __forceinline__ void meet_at_the_end(const ep_shape& shape, flag_kind kind,
                                                const ep_totals& totals, std::uint64_t round) {
  __syncthreads();
  tell_peers(shape, kind);
  if (blockIdx.x == 0) wait_for_peers(shape, kind, totals, round);
}

/// The beginning: the first block tells the peers that this rank is there, each waits for theirs.
__device__ __forceinline__ void meet_at_the_beginning(const ep_shape& shape, flag_kind kind,
                                                      const ep_totals& totals,
                                                      std::uint64_t round) {
  if (blockIdx.x == 0) tell_peers(shape, kind);
  wait_for_peers(shape, kind, totals, round);
  __syncthreads();
}

// --- plan ----------------------------------------------------------------------------------------

constexpr int k_counting_blocks = 8;

/// Memory of the device, zero between plans.
struct expert_counts {
  int* chosen = nullptr;  ///< [experts]
  int* blocks_done = nullptr;
};

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

/// Calls `visit(expert)` for each choice of a token that is one.
template <class Visit>
__device__ __forceinline__ void for_choices(const ep_shape& shape, const token_arrays& from, int t,
                                            Visit&& visit) {
  const std::int64_t* const ids = from.ids + static_cast<std::size_t>(t) * shape.top_k;
  for (int first = 0; first < shape.top_k; first += 8) {
    std::int64_t some[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) some[k] = first + k < shape.top_k ? ids[first + k] : -1;
#pragma unroll
    for (int k = 0; k < 8; ++k) {
      if (some[k] >= 0) visit(some[k]);
    }
  }
}

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
                std::uint64_t round, bool shared_masks,
                const __grid_constant__ expert_counts counts) {
  asm volatile("griddepcontrol.launch_dependents;");
  extern __shared__ __align__(8) std::int32_t words[];
  if (blockIdx.x > 0) return count_choices(shape, from, counts, words);
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
  const int message = shape.count_words();
  for (int i = thread; i < shape.ranks * message; i += threads) {
    const int r = i / message;
    const int word = i % message;
    const int expert = r * shape.local_experts + word - shape.ranks;
    shape.count_message(r, shape.rank)[word] =
        word < shape.ranks ? going[word] : __ldcg(counts.chosen + expert);
    if (word >= shape.ranks) counts.chosen[expert] = 0;
  }
  __syncthreads();
  tell_peers(shape, flag_kind::counts);

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

  wait_for_peers(shape, flag_kind::counts, totals, round);
  __syncthreads();
  const auto said = [&](int source, int word) {
    return __ldcg(shape.count_message(shape.rank, source) + word);
  };
  if (thread < shape.ranks) {
    int first = 0;
    int end = 0;
    for (int s = 0; s < shape.ranks; ++s) {
      if (s < shape.rank) first += said(s, thread);
      if (s <= thread) end += said(s, shape.rank);
    }
    to.first[thread] = first;
    totals.words[1 + thread] = end;
    if (thread == shape.ranks - 1) totals.words[0] = end;
  }
  for (int e = thread; e < shape.local_experts; e += threads) {
    int rows = 0;
    for (int s = 0; s < shape.ranks; ++s) rows += said(s, shape.ranks + e);
    totals.words[1 + shape.ranks + e] = rows;
  }
}

/// One block writes the totals where the CPU reads them.
__device__ __forceinline__ void tell_host(const ep_shape& shape, const ep_totals& totals,
                                          std::uint64_t round) {
  for (int i = static_cast<int>(threadIdx.x); i < 1 + shape.count_words();
       i += static_cast<int>(blockDim.x)) {
    totals.on_host[i] = totals.words[i];
  }
  __syncthreads();
  if (threadIdx.x == 0) signal(totals.round_on_host, round);
}

// --- send ----------------------------------------------------------------------------------------

/// Where a token's row lies at each rank: lane r of a warp knows ranks r and r + 32.
class rank_rows {
 public:
  rank_rows() = default;
  __device__ rank_rows(const ep_shape& shape, const plan_arrays& by, int t, int lane) {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      const int r = lane + 32 * i;
      if (r >= shape.ranks) continue;
      const int place = by.places[static_cast<std::size_t>(t) * shape.ranks + r];
      if (place >= 0) rows_[i] = by.first[r] + place;
    }
  }
  /// The row at rank r, or -1. By all lanes.
  __device__ int of(int r) const {
    const int low = __shfl_sync(k_whole_warp, rows_[0], r % 32);
    const int high = __shfl_sync(k_whole_warp, rows_[1], r % 32);
    return r < 32 ? low : high;
  }
  /// How many ranks it goes to. By all lanes.
  __device__ int count() const {
    return __popc(__ballot_sync(k_whole_warp, rows_[0] >= 0)) +
           __popc(__ballot_sync(k_whole_warp, rows_[1] >= 0));
  }
  /// Calls `visit(r, row)` in the lane that knows rank r.
  template <class Visit>
  __device__ void for_mine(const ep_shape& shape, int lane, Visit&& visit) const {
#pragma unroll
    for (int i = 0; i < each; ++i) {
      if (rows_[i] >= 0) visit(lane + 32 * i, static_cast<std::size_t>(rows_[i]));
    }
  }

 private:
  static constexpr int each = 2;
  static_assert(each * 32 == ep_shape::most_ranks);
  int rows_[each] = {-1, -1};
};

constexpr int k_send_warps = 30;  ///< of a block, at most

/// Each warp takes token after token: its row into shared memory once, and from there to every rank
/// that it goes to, while its lanes store what belongs to the row.
__global__ void __launch_bounds__(k_send_warps * 32)
    send_kernel(const __grid_constant__ ep_shape shape, const __grid_constant__ token_arrays from,
                const __grid_constant__ plan_arrays by, const __grid_constant__ ep_totals totals,
                std::uint64_t counts_round, std::uint64_t round, bool met) {
  extern __shared__ __align__(128) char stages[];  // a row for each warp, then their barriers
  const int warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  char* const stage = stages + static_cast<std::size_t>(warp) * shape.row_bytes;
  auto* const loaded =
      reinterpret_cast<std::uint64_t*>(stages + static_cast<std::size_t>(warps) * shape.row_bytes) +
      warp;
  const auto load = [&](int t) {
    barrier_expect(loaded, shape.row_bytes);
    bulk_load(stage, from.x + static_cast<std::size_t>(t) * shape.row_bytes, shape.row_bytes,
              loaded);
  };
  const int first = static_cast<int>(blockIdx.x) * warps + warp;
  if (lane == 0) {
    barrier_init(loaded);
    fence_bulk();
    if (first < from.count) load(first);  // wherever it goes
  }
  if (met) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    if (blockIdx.x == gridDim.x - 1) tell_host(shape, totals, counts_round);
  } else {
    meet_at_the_beginning(shape, flag_kind::counts, totals, counts_round);
  }

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
    if (from.ids != nullptr && lane < shape.top_k) {
      expert = from.ids[token * shape.top_k + lane];
      if (from.weights != nullptr) weight = from.weights[token * shape.top_k + lane];
    }
    float scales[k_lane_scales];
    for (int i = 0; i < k_lane_scales; ++i) {
      const int s = lane + 32 * i;
      if (s < shape.scale_count) scales[i] = from.scales[token * shape.scale_count + s];
    }
    barrier_wait(loaded, phase);
    phase ^= 1;
    rows.for_mine(shape, lane, [&](int r, std::size_t row) {
      bulk_store(shape.at<char>(r, shape.x) + row * shape.row_bytes, stage, shape.row_bytes);
    });
    bulk_commit();
    if (from.ids == nullptr && shape.scale_count == 0) continue;
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
      if (from.ids == nullptr) continue;
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
  meet_at_the_end(shape, flag_kind::rows, totals, round);
}

// --- combine -------------------------------------------------------------------------------------

constexpr int k_combine_warps = 16;  ///< of a block, at most
constexpr int k_most_stages = 6;     ///< of a warp: one is summed while the others are loaded

/// Elements of a token that a warp sums at a time: the fewer, the more ranks there are, since a
/// stage holds those of all.
inline int combine_chunk(const ep_shape& shape) {
  return shape.ranks <= 8 ? 1024 : shape.ranks <= 16 ? 512 : 256;
}

/// Eight elements, loaded and stored at once.
struct alignas(16) bf16_piece {
  __nv_bfloat162 pairs[4];
};

__device__ __forceinline__ void add(float (&sum)[8], const bf16_piece& piece) {
#pragma unroll
  for (int p = 0; p < 4; ++p) {
    const float2 pair = __bfloat1622float2(piece.pairs[p]);
    sum[2 * p] += pair.x;
    sum[2 * p + 1] += pair.y;
  }
}

/// Each warp takes chunk after chunk: loads it from every rank that the token went to, sums in FP32
/// and in the order of ranks, and stores the result.
__global__ void __launch_bounds__(k_combine_warps * 32)
    combine_kernel(const __grid_constant__ ep_shape shape, int tokens, int pieces, int chunk,
                   int stages, const __grid_constant__ plan_arrays by, __nv_bfloat16* out,
                   const __nv_bfloat16* bias, const __grid_constant__ ep_totals totals,
                   std::uint64_t round) {
  extern __shared__ __align__(128) char rows_loaded[];  // warps x stages, then their barriers
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
  meet_at_the_beginning(shape, flag_kind::ready, totals, round);
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
    return item < count ? rank_rows(shape, by, item / pieces, lane) : rank_rows();
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
    const std::uint64_t mask = next_mask;
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
        if (bias != nullptr) add(sum, *reinterpret_cast<const bf16_piece*>(bias + begin + i));
        for (std::uint64_t left = mask; left != 0; left &= left - 1) {
          const int r = __ffsll(static_cast<long long>(left)) - 1;
          add(sum, *reinterpret_cast<const bf16_piece*>(
                       rows + static_cast<std::uint32_t>(r) * chunk_bytes +
                       static_cast<std::size_t>(i) * sizeof(__nv_bfloat16)));
        }
        bf16_piece made;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
          made.pairs[p] = __floats2bfloat162_rn(sum[2 * p], sum[2 * p + 1]);
        }
        *reinterpret_cast<bf16_piece*>(out + begin + i) = made;
      }
      stage = stage + 1 == stages ? 0 : stage + 1;
    }
  }
  meet_at_the_end(shape, flag_kind::finished, totals, round);
}

}  // namespace evmm::ep
