// SPDX-License-Identifier: Apache-2.0
#include "tests/mpi/rank_cases.hpp"
#include "tests/support/ep_cases.hpp"

namespace evmm::test {
namespace {

using ep_processes = rank_processes;

TEST_P(ep_processes, holds) {
  GetParam().run(this_rank());
}
INSTANTIATE_TEST_SUITE_P(all, ep_processes, ::testing::ValuesIn(ep_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(low_latency, ep_processes, ::testing::ValuesIn(low_latency_cases()),
                         case_name);

const symmetric_case k_many_exchanges{
    "many_exchanges_are_exact", [](const rank_context& at) { run_random_exchanges(at, 100, 11); }};
const symmetric_case k_many_low_latency{
    "many_low_latency_rounds_are_exact",
    [](const rank_context& at) { run_random_low_latency(at, 200, 12); }};
INSTANTIATE_TEST_SUITE_P(random, ep_processes,
                         ::testing::Values(k_many_exchanges, k_many_low_latency), case_name);

}  // namespace
}  // namespace evmm::test
