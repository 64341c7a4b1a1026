// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/job_support.hpp"

#include <functional>

// What the cases between nodes share.

namespace evmm::bench {

constexpr int k_node_rounds = 10;

/// Ranks that are all on one host pretend to be on several, of EVMM_BENCH_RANKS_A_NODE ranks each,
/// of 1 unless it is set: for evmm and for NCCL. Before anything else of the process.
void pretend_hosts();

/// Times `step` on all ranks together, by the host's clock; once before for what is set up at the
/// first use.
void measure_together(benchmark::State& state, const job& at, const std::function<void()>& step);

/// Expert-parallel dispatch and combine between nodes, beside the same rows sent rank by rank.
void add_node_exchanges(const job& at);

}  // namespace evmm::bench
