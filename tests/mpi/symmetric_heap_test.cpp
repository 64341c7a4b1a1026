// SPDX-License-Identifier: Apache-2.0
#include "tests/mpi/rank_cases.hpp"
#include "tests/support/heap_cases.hpp"

namespace evmm::test {
namespace {

using heap_processes = rank_processes;

TEST_P(heap_processes, holds) {
  GetParam().run(this_rank());
}
INSTANTIATE_TEST_SUITE_P(all, heap_processes, ::testing::ValuesIn(heap_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(changes, heap_processes, ::testing::ValuesIn(heap_change_cases()),
                         case_name);

const symmetric_case k_many_calls{"ten_thousand_calls_place_alike",
                                  [](const rank_context& at) { run_random_heap(at, 10'000, 11); }};
INSTANTIATE_TEST_SUITE_P(random, heap_processes, ::testing::Values(k_many_calls), case_name);

}  // namespace
}  // namespace evmm::test
