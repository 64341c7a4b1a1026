// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/allocator_cases.hpp"

namespace evmm::bench {

using traces = std::vector<std::shared_ptr<const allocation_trace>>;

/// Allocators of host memory, whose bookkeeping is the measure for ours: glibc's malloc
/// (peer_malloc), and mimalloc where its library is installed (peer_mimalloc).
void add_host_peers(const traces& all);

/// The CUDA runtime's own: cudaMallocAsync with a pool that keeps what is freed
/// (peer_cudaMallocAsync), cudaMalloc (peer_cudaMalloc; no replay, it synchronises).
void add_cuda_allocator_peers(const machine& here, const traces& all);

}  // namespace evmm::bench
