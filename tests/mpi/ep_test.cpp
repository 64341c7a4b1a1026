// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"
#include "tests/mpi/rank_cases.hpp"
#include "tests/support/ep_cases.hpp"

namespace evmm::test {
namespace {

using ep_processes = rank_processes;

TEST_P(ep_processes, holds) {
  GetParam().run(this_rank());
}
INSTANTIATE_TEST_SUITE_P(all, ep_processes, ::testing::ValuesIn(ep_cases()), case_name);

INSTANTIATE_TEST_SUITE_P(calls, ep_processes, ::testing::ValuesIn(ep_call_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(lost, ep_processes, ::testing::ValuesIn(lost_rank_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(low_latency, ep_processes, ::testing::ValuesIn(low_latency_cases()),
                         case_name);

/// More of them on demand: a long run is EVMM_EP_ROUNDS=10000.
std::size_t rounds_or(std::size_t usual) {
  return static_cast<std::size_t>(environment_integer("EVMM_EP_ROUNDS", 1, 10'000'000)
                                      .value_or(static_cast<std::int64_t>(usual)));
}

const symmetric_case k_many_exchanges{
    "many_exchanges_are_exact", [](const rank_context& at) {
      run_random_exchanges(at, rounds_or(at.ranks->node_count() > 1 ? 20 : 100), 11);
    }};
const symmetric_case k_many_low_latency{
    "many_low_latency_rounds_are_exact", [](const rank_context& at) {
      run_random_low_latency(at, rounds_or(at.ranks->node_count() > 1 ? 40 : 200), 12);
    }};
INSTANTIATE_TEST_SUITE_P(random, ep_processes,
                         ::testing::Values(k_many_exchanges, k_many_low_latency), case_name);

}  // namespace
}  // namespace evmm::test
