// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/ep_cases.hpp"

#include <evmm/driver.hpp>

#include <gtest/gtest.h>

#include <string>

namespace evmm::test {
namespace {

class ep_processes : public ::testing::TestWithParam<symmetric_case> {};

rank_context here() {
  const auto on = default_driver();
  return {.ranks = world(), .on = on, .device = {world()->node_rank() % on->device_count()}};
}

bool missing_gpu(std::string& why_not) {
  return environment("EVMM_DRIVER") == "cuda" && !cuda_available(&why_not);
}

TEST_P(ep_processes, holds) {
  std::string why_not;
  if (missing_gpu(why_not)) GTEST_SKIP() << why_not;
  GetParam().run(here());
}
INSTANTIATE_TEST_SUITE_P(all, ep_processes, ::testing::ValuesIn(ep_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(ep_processes_random, many_exchanges_are_exact) {
  std::string why_not;
  if (missing_gpu(why_not)) GTEST_SKIP() << why_not;
  run_random_exchanges(here(), 100, 11);
}

}  // namespace
}  // namespace evmm::test
