// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/send_row.cuh"

namespace evmm::ep {

/// Each warp takes token after token: its row into shared memory once, and from there to every rank
/// that it goes to, while its lanes store what belongs to the row.
__global__ void __launch_bounds__(k_send_warps * 32)
    send_kernel(const __grid_constant__ ep_shape shape, const __grid_constant__ token_arrays from,
                const __grid_constant__ plan_arrays by, const __grid_constant__ ep_totals totals,
                std::uint64_t* rounds, std::uint64_t ticket) {
  extern __shared__ __align__(128) char shared[];
  const int warps = static_cast<int>(blockDim.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  warp_row stage(shared, shape.given_bytes());
  const std::uint64_t round = this_round(rounds);
  const int first = static_cast<int>(blockIdx.x) * warps + static_cast<int>(threadIdx.x / 32);
  if (lane == 0) {
    stage.init();
    if (first < from.count) stage.load(from.x, first);  // wherever it goes
  }
  wait_for_previous();
  if (blockIdx.x == gridDim.x - 1) tell_host(shape, totals, ticket);

  for (int t = first; t < from.count; t += static_cast<int>(gridDim.x) * warps) {
    if (t != first) {
      bulk_wait_read();
      __syncwarp();
      if (lane == 0) stage.load(from.x, t);
    }
    // All that is known of the token is fetched while its row is.
    const rank_rows rows(shape, by, t, lane);
    row_belongings belongings(shape, from, t, lane);
    stage.wait();
    belongings.store(shape, rows, stage.get());
  }
  bulk_wait_written();
  meet_at_the_end(shape, flag_kind::rows, totals, rounds, round);
}

}  // namespace evmm::ep
