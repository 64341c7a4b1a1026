// SPDX-License-Identifier: Apache-2.0
#include "tests/mpi/rank_cases.hpp"
#include "tests/support/channel_cases.hpp"

namespace evmm::test {
namespace {

using channel_processes = rank_processes;

TEST_P(channel_processes, holds) {
  GetParam().run(this_rank());
}
INSTANTIATE_TEST_SUITE_P(pairs, channel_processes, ::testing::ValuesIn(channel_cases()), case_name);
INSTANTIATE_TEST_SUITE_P(all, channel_processes, ::testing::ValuesIn(channel_collective_cases()),
                         case_name);

}  // namespace
}  // namespace evmm::test
