// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bf16_pieces.cuh"
#include "comm/ep/choices.cuh"
#include "comm/ep/place_group.cuh"
#include "comm/ep/send_row.cuh"

#include <cstddef>
#include <cstdint>

// One step each way; host_low_latency.cpp says the same in fewer words.

namespace evmm::ep {

constexpr int k_low_latency_warps = 16;  ///< of a dispatch's block, at most
constexpr int k_returning_warps = 30;    ///< of a combine's block, at most

/// Which part of a step a kernel does.
struct low_latency_parts {
  bool issue = false;
  bool wait = false;
};

__device__ __forceinline__ bool is_dead(std::uint64_t dead, int r) {
  return (dead >> r & 1) != 0;
}

/// Thread r of the first `ranks` tells rank r, unless it is dead.
__device__ __forceinline__ void tell_living(const ep_shape& shape, flag_kind kind,
                                            std::uint64_t dead) {
  const auto r = static_cast<int>(threadIdx.x);
  if (r < shape.ranks && !is_dead(dead, r)) {
    signal_add(shape.flag(r, kind, shape.rank), 1);
  }
}

/// Thread r of the first `ranks` waits for rank r, which is dead when it does not come in time.
/// Returns who is dead then, to all threads of the block.
__device__ __forceinline__ std::uint64_t wait_for_living(const ep_shape& shape,
                                                         const low_latency_slot& slot,
                                                         flag_kind kind, const ep_totals& totals,
                                                         std::uint64_t round, std::uint64_t dead) {
  const auto r = static_cast<int>(threadIdx.x);
  if (r < shape.ranks && !is_dead(dead, r)) {
    const std::uint64_t* flag = shape.flag(shape.rank, kind, r);
    const std::uint64_t goal = shape.goal(kind, round);
    const std::uint64_t begin = nanoseconds_now();
    while (read_signal(flag) < goal) {
      if (nanoseconds_now() - begin > shape.timeout_ns) {
        atomicOr(reinterpret_cast<unsigned long long*>(slot.dead), 1ull << r);
        atomicOr_system(reinterpret_cast<unsigned long long*>(totals.lost_on_host), 1ull << r);
        break;
      }
    }
  }
  __threadfence();
  __syncthreads();
  return __ldcg(reinterpret_cast<const unsigned long long*>(slot.dead));
}

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

/// Every block finds for itself where each token goes; each warp then takes token after token as in
/// send_kernel. Rows of this rank have places of their own at every peer.
__global__ void __launch_bounds__(k_low_latency_warps * 32)
    low_latency_dispatch_kernel(const __grid_constant__ ep_shape shape,
                                const __grid_constant__ low_latency_slot slot,
                                const __grid_constant__ token_arrays from,
                                const __grid_constant__ ep_totals totals, std::uint64_t* rounds,
                                low_latency_parts parts) {
  // What follows may be set up meanwhile.
  asm volatile("griddepcontrol.launch_dependents;");
  extern __shared__ __align__(128) char shared[];
  const int warps = static_cast<int>(blockDim.x / 32);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint64_t dead = __ldcg(reinterpret_cast<const unsigned long long*>(slot.dead));
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
      if (blockIdx.x == 0) slot.masks[t] = mask & ~dead;
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
    if (blockIdx.x == 0 && threadIdx.x < static_cast<unsigned>(shape.ranks)) {
      const auto r = static_cast<int>(threadIdx.x);
      if (!is_dead(dead, r)) {
        shape.at<std::int32_t>(r, slot.source_rows)[shape.rank] = know.before(r, from.count);
      }
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
        return (mask >> r & 1) != 0 ? shape.rank * slot.max_tokens + know.before(r, t) : -1;
      });
      stage.wait();
      belongings.store(shape, rows, stage.get(), [&](int r, std::size_t row, int index) {
        if (lane == 0) shape.at<std::int32_t>(r, slot.origins)[row] = t * slot.width + index;
      });
    }
    bulk_wait_written();
    __syncthreads();
    if (threadIdx.x == 0) rounds[blockIdx.x] = round;
    tell_living(shape, flag_kind::rows, dead);
  } else {
    --round;  // that of the issue
  }
  if (parts.wait && blockIdx.x == 0) {
    const std::uint64_t now = wait_for_living(shape, slot, flag_kind::rows, totals, round, dead);
    const auto r = static_cast<int>(threadIdx.x);
    if (r < shape.ranks && is_dead(now, r)) {
      shape.at<std::int32_t>(shape.rank, slot.source_rows)[r] = 0;
    }
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
  asm volatile("griddepcontrol.wait;" ::: "memory");
  extern __shared__ __align__(128) char shared[];
  const int warps = static_cast<int>(blockDim.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  warp_row stage(shared, shape.row_bytes);
  if (lane == 0) stage.init();
  const auto word = [](const std::uint64_t* at) {
    return __ldcg(reinterpret_cast<const unsigned long long*>(at));
  };
  const std::uint64_t now =
      wait_for_living(shape, slot, flag_kind::rows, totals, word(dispatch_rounds), word(slot.dead));
  auto* const source_rows = shape.at<std::int32_t>(shape.rank, slot.source_rows);
  const place_range group = place_group(shape, to, static_cast<int>(blockIdx.x), [&](int place) {
    const int source = place / to.rows.stride;
    return !is_dead(now, source) && place % to.rows.stride < __ldcg(source_rows + source);
  });
  const auto r = static_cast<int>(threadIdx.x);
  if (blockIdx.x == 0 && r < shape.ranks && is_dead(now, r)) source_rows[r] = 0;
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

/// Pieces of a row that a warp takes at a time: to send it back, and to sum.
struct row_pieces {
  int back;  ///< a power of two, so that they are equally long
  int sums;
};

/// Each warp takes piece after piece of the rows that came and stores what the experts made of them
/// at the ranks they came from; then piece after piece of this rank's tokens, and sums what came.
__global__ void __launch_bounds__(k_returning_warps * 32) low_latency_combine_kernel(
    const __grid_constant__ ep_shape shape, const __grid_constant__ low_latency_slot slot,
    const __grid_constant__ expert_layout made, bool by_expert, row_pieces pieces, int count,
    const __grid_constant__ combine_output to, const __grid_constant__ ep_totals totals,
    std::uint64_t* rounds, low_latency_parts parts) {
  extern __shared__ __align__(128) char shared[];
  const int lane = static_cast<int>(threadIdx.x % 32);
  const int first = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x) / 32;
  const int step = static_cast<int>(gridDim.x * blockDim.x) / 32;
  std::uint64_t dead = __ldcg(reinterpret_cast<const unsigned long long*>(slot.dead));
  std::uint64_t round = this_round(rounds);
  if (parts.issue) {
    const int length = shape.hidden / pieces.back;
    const auto bytes = static_cast<std::uint32_t>(length * sizeof(__nv_bfloat16));
    warp_row stage(shared, bytes);
    if (lane == 0) stage.init();
    __syncwarp();
    const char* const y = shape.at<char>(shape.rank, shape.y);
    const auto* const expert_y = reinterpret_cast<const __nv_bfloat16*>(made.y);
    const int items = made.rows.places() * pieces.back;
    for (int item = first; item < items; item += step) {
      const int place = item / pieces.back;
      const int source = place / slot.max_tokens;
      // Fetched together; what lies where no row came is not looked at.
      const bool there = has_row(made.rows, place) && !is_dead(dead, source);
      const int origin = shape.at<std::int32_t>(shape.rank, slot.origins)[place];
      const int begin = item % pieces.back * length;
      auto* const back = shape.at<__nv_bfloat16>(source, slot.returns) +
                         static_cast<std::size_t>(there ? origin : 0) * shape.hidden;
      if (!by_expert) {
        if (!there) continue;
        bulk_wait_read();
        __syncwarp();
        if (lane == 0) {
          stage.load(y, item);
        }
        stage.wait();
        if (lane == 0) bulk_store(back + begin, stage.get(), bytes);
        bulk_commit();
        continue;
      }
      const row_choices choices(shape, made, static_cast<std::size_t>(place), there, lane);
      if (!there) continue;
      const int end = begin + length;
      for (int from = begin; from < end; from += k_elements_together) {
        const int i = from + lane * 8;
        float sum[k_pieces_together][8] = {};
        add_rows(
            sum, choices.count(), i, end,
            [&](int j) { return expert_y + choices.row(j) * shape.hidden; },
            [&](int j) { return choices.weight(j); });
        store_sums(back, sum, i, end);
      }
    }
    bulk_wait_written();
    __syncthreads();
    if (threadIdx.x == 0) rounds[blockIdx.x] = round;
    tell_living(shape, flag_kind::sums, dead);
  } else {
    --round;
  }
  if (!parts.wait) return;

  dead = wait_for_living(shape, slot, flag_kind::sums, totals, round, dead);
  auto* const out = static_cast<__nv_bfloat16*>(to.sums);
  const auto* const bias = static_cast<const __nv_bfloat16*>(to.bias);
  const auto* const returns = shape.at<__nv_bfloat16>(shape.rank, slot.returns);
  const int length = (shape.hidden / 8 + pieces.sums - 1) / pieces.sums * 8;
  const auto once = [](int) { return 1.0f; };
  for (int item = first; item < count * pieces.sums; item += step) {
    const auto t = static_cast<std::size_t>(item / pieces.sums);
    const std::uint64_t mask = slot.masks[t];
    unsigned left_out = 0;  // of the rows that came back for it
    if ((mask & dead) != 0) {
      int index = 0;
      for (std::uint64_t left = mask; left != 0; left &= left - 1, ++index) {
        if (is_dead(dead, __ffsll(static_cast<long long>(left)) - 1)) left_out |= 1u << index;
      }
    }
    const auto* const rows = returns + t * slot.width * shape.hidden;
    const int begin = item % pieces.sums * length;
    const int end = min(shape.hidden, begin + length);
    for (int from = begin; from < end; from += k_elements_together) {
      const int i = from + lane * 8;
      float sum[k_pieces_together][8] = {};
      if (bias != nullptr) {
        add_rows(
            sum, 1, i, end, [&](int) { return bias + t * shape.hidden; }, once);
      }
      const auto row_at = [&](int j) -> const __nv_bfloat16* {
        if ((left_out >> j & 1) != 0) return nullptr;
        return rows + static_cast<std::size_t>(j) * shape.hidden;
      };
      add_rows(sum, __popcll(mask), i, end, row_at, once);
      store_sums(out + t * shape.hidden, sum, i, end);
    }
  }
}

}  // namespace evmm::ep
