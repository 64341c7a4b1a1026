// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/fake_nccl.hpp"
#include "tests/support/nccl_window_checks.hpp"
#include "tests/support/scoped_variable.hpp"
#include "tests/support/symmetric_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/nccl_window.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <exception>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// Ranks with regions and windows on the fake NCCL.

namespace evmm::test {

using namespace evmm::units;

/// Threads as ranks, each with a driver of its own; what one throws fails the test.
inline void run_nccl_ranks(int size, const std::function<void(const rank_context&)>& body,
                           bootstrap::milliseconds timeout = bootstrap::milliseconds(20'000)) {
  const auto bootstraps = make_thread_bootstraps(size);
  for (const auto& one : bootstraps) one->set_timeout(timeout);
  const auto thrown = run_ranks(size, [&](int rank) {
    body({.ranks = bootstraps[static_cast<std::size_t>(rank)],
          .on = host_driver::make({.device_bytes = 1_GiB, .host_bytes = 4_GiB})});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

/// While it is there, sends and receives of ranks with these drivers go onto their streams.
class fake_nccl_streams {
 public:
  explicit fake_nccl_streams(std::vector<std::shared_ptr<driver>> of_ranks) {
    fake_nccl_launch_by([of_ranks = std::move(of_ranks)](int rank, native_stream stream,
                                                         std::function<void()> work) {
      of_ranks[static_cast<std::size_t>(rank)]->launch(stream, std::move(work));
    });
  }
  fake_nccl_streams(const fake_nccl_streams&) = delete;
  fake_nccl_streams& operator=(const fake_nccl_streams&) = delete;
  ~fake_nccl_streams() { fake_nccl_launch_by(nullptr); }
};

/// Every test starts from a fake of one version, and ends with nothing registered in it.
class nccl_fixture {
 public:
  explicit nccl_fixture(fake_nccl_settings settings) { fake_nccl_configure(&settings); }
  nccl_fixture(const nccl_fixture&) = delete;
  nccl_fixture& operator=(const nccl_fixture&) = delete;
  ~nccl_fixture() {
    const fake_nccl_counts left = fake_nccl_count();
    EXPECT_EQ(left.communicators, 0);
    EXPECT_EQ(left.windows, 0);
    EXPECT_EQ(left.device_communicators, 0);
    EXPECT_EQ(left.buffers, 0);
    EXPECT_EQ(left.window_bytes, 0u);
    EXPECT_EQ(left.remapped, before_.remapped) << "memory was replaced under a live window";
    EXPECT_EQ(left.registered_before_any, before_.registered_before_any);
  }

 private:
  fake_nccl_counts before_ = fake_nccl_count();
};

}  // namespace evmm::test
