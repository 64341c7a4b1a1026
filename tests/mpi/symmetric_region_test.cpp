// SPDX-License-Identifier: Apache-2.0
#include "tests/mpi/rank_cases.hpp"

namespace evmm::test {
namespace {

using symmetric_processes = rank_processes;

TEST_P(symmetric_processes, holds) {
  GetParam().run(this_rank());
}
INSTANTIATE_TEST_SUITE_P(all, symmetric_processes, ::testing::ValuesIn(symmetric_cases()),
                         case_name);

}  // namespace
}  // namespace evmm::test
