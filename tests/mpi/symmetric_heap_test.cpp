// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/heap_cases.hpp"

#include <evmm/driver.hpp>

#include <gtest/gtest.h>

#include <string>

namespace evmm::test {
namespace {

class heap_processes : public ::testing::TestWithParam<symmetric_case> {};

rank_context here() {
  const auto on = default_driver();
  return {.ranks = world(), .on = on, .device = {world()->node_rank() % on->device_count()}};
}

bool missing_gpu(std::string& why_not) {
  return environment("EVMM_DRIVER") == "cuda" && !cuda_available(&why_not);
}

TEST_P(heap_processes, holds) {
  std::string why_not;
  if (missing_gpu(why_not)) GTEST_SKIP() << why_not;
  GetParam().run(here());
}
INSTANTIATE_TEST_SUITE_P(all, heap_processes, ::testing::ValuesIn(heap_cases()),
                         [](const auto& info) { return info.param.name; });

TEST(heap_processes_random, ten_thousand_calls_place_alike) {
  std::string why_not;
  if (missing_gpu(why_not)) GTEST_SKIP() << why_not;
  run_random_heap(here(), 10'000, 11);
}

}  // namespace
}  // namespace evmm::test
