// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <cstdint>

namespace evmm::ep {

constexpr unsigned k_whole_warp = 0xffffffffu;

__device__ __forceinline__ std::uint64_t nanoseconds_now() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

/// Calls `visit(r)` for each rank, in a thread of the block: in thread r, where there are as many.
template <class Visit>
__device__ __forceinline__ void for_ranks(const ep_shape& shape, const Visit& visit) {
  for (int r = static_cast<int>(threadIdx.x); r < shape.ranks; r += static_cast<int>(blockDim.x)) {
    visit(r);
  }
}

/// Tells each rank. What the block wrote before it synchronised, and what it has seen of others, is
/// visible to whoever sees the flag.
__device__ __forceinline__ void tell_peers(const ep_shape& shape, flag_kind kind) {
  for_ranks(shape, [&](int r) { signal_add(shape.flag(r, kind, shape.rank), 1); });
}

/// Waits for each rank, as long as the timeout allows.
__device__ __forceinline__ void wait_for_peers(const ep_shape& shape, flag_kind kind,
                                               const ep_totals& totals, std::uint64_t round) {
  const std::uint64_t goal = shape.goal(kind, round);
  const std::uint64_t begin = nanoseconds_now();
  for_ranks(shape, [&](int r) {
    const std::uint64_t* flag = shape.flag(shape.rank, kind, r);
    while (read_signal(flag) < goal) {
      if (nanoseconds_now() - begin > shape.timeout_ns) {
        atomicOr_system(reinterpret_cast<unsigned long long*>(totals.lost_on_host), 1ull << r);
        break;
      }
    }
  });
}

/// A kernel's round: each block counts its own, since they do not start and end together. Counted
/// on the device, so that a captured graph counts on when it is replayed.
__device__ __forceinline__ std::uint64_t this_round(const std::uint64_t* rounds) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(rounds) + blockIdx.x) + 1;
}

/// The end of a kernel: each block tells the peers that it is done, and the first one stays until
/// theirs are.
__device__ __forceinline__ void meet_at_the_end(const ep_shape& shape, flag_kind kind,
                                                const ep_totals& totals, std::uint64_t* rounds,
                                                std::uint64_t round) {
  __syncthreads();
  if (threadIdx.x == 0) rounds[blockIdx.x] = round;
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

__device__ __forceinline__ bool is_dead(std::uint64_t dead, int r) {
  return (dead >> r & 1) != 0;
}

/// A bit for each rank that did not come in time.
__device__ __forceinline__ std::uint64_t read_dead(const std::uint64_t* word) {
  return __ldcg(reinterpret_cast<const unsigned long long*>(word));
}

/// Tells each rank, unless it is dead.
__device__ __forceinline__ void tell_living(const ep_shape& shape, flag_kind kind,
                                            std::uint64_t dead) {
  for_ranks(shape, [&](int r) {
    if (!is_dead(dead, r)) signal_add(shape.flag(r, kind, shape.rank), 1);
  });
}

/// Waits for each rank, which is dead when it does not come in time. Returns who is dead then, to
/// all threads of the block.
__device__ __forceinline__ std::uint64_t wait_for_living(const ep_shape& shape, flag_kind kind,
                                                         const ep_totals& totals,
                                                         std::uint64_t round,
                                                         std::uint64_t* dead_word) {
  const std::uint64_t dead = read_dead(dead_word);
  const std::uint64_t goal = shape.goal(kind, round);
  const std::uint64_t begin = nanoseconds_now();
  for_ranks(shape, [&](int r) {
    if (is_dead(dead, r)) return;
    const std::uint64_t* flag = shape.flag(shape.rank, kind, r);
    while (read_signal(flag) < goal) {
      if (nanoseconds_now() - begin > shape.timeout_ns) {
        atomicOr(reinterpret_cast<unsigned long long*>(dead_word), 1ull << r);
        atomicOr_system(reinterpret_cast<unsigned long long*>(totals.lost_on_host), 1ull << r);
        break;
      }
    }
  });
  __threadfence();
  __syncthreads();
  return read_dead(dead_word);
}

/// A word of the host that only this thread writes becomes at least `value`.
__device__ __forceinline__ void raise(std::uint64_t* word, std::uint64_t value) {
  if (value > read_signal(word)) signal(word, value);
}

/// One block writes the totals where the CPU reads them.
__device__ __forceinline__ void tell_host(const ep_shape& shape, const ep_totals& totals,
                                          std::uint64_t ticket) {
  for (int i = static_cast<int>(threadIdx.x); i < 1 + shape.count_words();
       i += static_cast<int>(blockDim.x)) {
    totals.on_host[i] = totals.words[i];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  raise(totals.most_rows_on_host, static_cast<std::uint64_t>(totals.words[0]));
  raise(totals.ticket_on_host, ticket);  // a replayed graph brings one from before
}

}  // namespace evmm::ep
