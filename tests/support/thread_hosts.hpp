// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/symmetric_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace evmm::test {

using namespace evmm::units;

/// Ranks as threads on pretended hosts, "aabb" for two of two ranks each; none may throw.
inline void run_hosts(const std::string& hosts,
                      const std::function<void(const rank_context&)>& body,
                      std::chrono::milliseconds timeout = std::chrono::milliseconds(20'000)) {
  std::vector<std::string> names;
  for (const char host : hosts) names.emplace_back(1, host);
  const auto bootstraps = make_thread_bootstraps(static_cast<int>(hosts.size()), names);
  for (const auto& each : bootstraps) each->set_timeout(timeout);
  const auto thrown = run_ranks(static_cast<int>(hosts.size()), [&](int rank) {
    body({.ranks = bootstraps[static_cast<std::size_t>(rank)],
          .on = host_driver::make({.device_bytes = 1_GiB, .host_bytes = 4_GiB})});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

}  // namespace evmm::test
