// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

struct threads_case {
  int ranks;
  symmetric_case tried;
  friend void PrintTo(const threads_case& run, std::ostream* out) {
    *out << run.tried.name << " on " << run.ranks << " ranks";
  }
};
class ep_threads : public ::testing::TestWithParam<threads_case> {};

TEST_P(ep_threads, holds) {
  const int size = GetParam().ranks;
  const auto bootstraps = make_thread_bootstraps(size);
  const auto thrown = run_ranks(size, [&](int rank) {
    GetParam().tried.run({.ranks = bootstraps[static_cast<std::size_t>(rank)],
                          .on = host_driver::make({.device_bytes = 4_GiB, .host_bytes = 4_GiB})});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

std::vector<threads_case> all_cases() {
  std::vector<threads_case> all;
  for (const int ranks : {1, 2, 4}) {
    for (const symmetric_case& tried : ep_cases()) all.push_back({ranks, tried});
    for (const symmetric_case& tried : low_latency_cases()) all.push_back({ranks, tried});
  }
  return all;
}
INSTANTIATE_TEST_SUITE_P(ranks, ep_threads, ::testing::ValuesIn(all_cases()), [](const auto& info) {
  return info.param.tried.name + "_" + std::to_string(info.param.ranks);
});

}  // namespace
}  // namespace evmm::test
