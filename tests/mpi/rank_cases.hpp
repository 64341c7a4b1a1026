// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/environment.hpp"
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/symmetric_cases.hpp"

#include <evmm/driver.hpp>

#include <gtest/gtest.h>

#include <string>

// The cases that ranks run side by side (tests/support), with processes as ranks.

namespace evmm::test {

/// This process, on the default driver. Ranks share devices where there are fewer.
inline rank_context this_rank() {
  const auto on = default_driver();
  return {.ranks = world(), .on = on, .device = {world()->node_rank() % on->device_count()}};
}

/// Skips where a GPU is asked for and there is none.
class rank_processes : public ::testing::TestWithParam<symmetric_case> {
 protected:
  void SetUp() override {
    std::string why_not;
    if (environment("EVMM_DRIVER") == "cuda" && !cuda_available(&why_not)) GTEST_SKIP() << why_not;
  }
};

inline std::string case_name(const ::testing::TestParamInfo<symmetric_case>& info) {
  return info.param.name;
}

}  // namespace evmm::test
