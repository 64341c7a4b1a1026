// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/bench_support.hpp"

namespace evmm::bench {

/// What programs do without evmm, through the CUDA runtime, on the same device in the same run.
/// peer/cudaMalloc: a buffer of this size is made.
/// peer/rebuild: a buffer of this size grows by `more`: a new one is made, the contents are copied,
///   the old one is freed.
void add_cuda_peers(const machine& here, std::size_t more);

}  // namespace evmm::bench
