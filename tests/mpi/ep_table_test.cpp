// SPDX-License-Identifier: Apache-2.0
#include "tests/mpi/rank_cases.hpp"
#include "tests/support/table_cases.hpp"

namespace evmm::test {
namespace {

using table_processes = rank_processes;

TEST_P(table_processes, holds) {
  GetParam().run(this_rank());
}
INSTANTIATE_TEST_SUITE_P(all, table_processes, ::testing::ValuesIn(table_cases()), case_name);

const symmetric_case k_many_tables{"many_tables_are_exact",
                                   [](const rank_context& at) { run_random_tables(at, 40, 17); }};
INSTANTIATE_TEST_SUITE_P(random, table_processes, ::testing::Values(k_many_tables), case_name);

}  // namespace
}  // namespace evmm::test
