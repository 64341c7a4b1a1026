// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/channel_cases.hpp"

#include <evmm/driver.hpp>

#include <gtest/gtest.h>

#include <string>

namespace evmm::test {
namespace {

class channel_processes : public ::testing::TestWithParam<symmetric_case> {};

TEST_P(channel_processes, holds) {
  std::string why_not;
  if (environment("EVMM_DRIVER") == "cuda" && !cuda_available(&why_not)) {
    GTEST_SKIP() << why_not;
  }
  const auto on = default_driver();
  GetParam().run(
      {.ranks = world(), .on = on, .device = {world()->node_rank() % on->device_count()}});
}
const auto k_name = [](const auto& info) { return info.param.name; };
INSTANTIATE_TEST_SUITE_P(pairs, channel_processes, ::testing::ValuesIn(channel_cases()), k_name);
INSTANTIATE_TEST_SUITE_P(all, channel_processes, ::testing::ValuesIn(channel_collective_cases()),
                         k_name);

}  // namespace
}  // namespace evmm::test
