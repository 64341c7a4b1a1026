// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/nodes_support.hpp"

#include "lib/support/environment.hpp"

#include <cstdlib>
#include <string>

namespace evmm::bench {

void pretend_hosts() {
  const auto world = environment_integer("OMPI_COMM_WORLD_SIZE", 1, 1 << 20);
  const auto here = environment_integer("OMPI_COMM_WORLD_LOCAL_SIZE", 1, 1 << 20);
  const auto rank = environment_integer("OMPI_COMM_WORLD_RANK", 0, 1 << 20);
  const auto a_node = environment_integer("EVMM_BENCH_RANKS_A_NODE", 1, 1 << 20);
  if (!rank || world != here) return;
  const std::string node = std::to_string(*rank / a_node.value_or(1));
  // NOLINTBEGIN(concurrency-mt-unsafe): there is one thread yet
  setenv("EVMM_HOST_ID", node.c_str(), 1);
  setenv("NCCL_HOSTID", ("evmm-bench-" + node).c_str(), 1);
  // NOLINTEND(concurrency-mt-unsafe)
}

void measure_together(benchmark::State& state, const job& at, const std::function<void()>& step) {
  step();
  for (auto _ : state) {
    at.ranks->barrier("bench: start");
    state.SetIterationTime(at.slowest(seconds(step)));
  }
}

}  // namespace evmm::bench
