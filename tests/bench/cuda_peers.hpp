// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/bench_support.hpp"

namespace evmm::bench {

/// What programs do without evmm, through the CUDA runtime, on the same device in the same run:
/// a buffer is made (grow/DEVICE/peer_cudaMalloc); a buffer grows by being made anew, copied and
/// freed (extend_by_1_GiB/DEVICE/peer_cudaMalloc_copy_free).
void add_cuda_peers(const machine& here);

}  // namespace evmm::bench
