// SPDX-License-Identifier: Apache-2.0
// NCCL between nodes: ranks of this machine that count as several, for evmm and for NCCL alike.
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/channel_cases.hpp"
#include "tests/support/ep_cases.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <optional>
#include <string>

namespace evmm::test {
namespace {

using namespace evmm::units;

/// A communicator of all ranks, and a channel's options with a link over it.
class nccl_link : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string why_not;
    if (!cuda_available(&why_not)) GTEST_SKIP() << why_not;
    at_.on = default_driver();
    at_.ranks = world();
    if (at_.on->device_count() < at_.ranks->size()) {
      GTEST_SKIP() << at_.ranks->size() << " ranks need as many GPUs, there are "
                   << at_.on->device_count();
    }
    // NCCL tells hosts apart by this, before anything of it runs, and takes its network between
    // them.
    setenv("NCCL_HOSTID", ("evmm-test-" + std::to_string(at_.ranks->node())).c_str(), 1);
    at_.device = device_id{at_.ranks->rank().value};
    nccl_.emplace(at_.ranks, at_.on, nccl_options{.device = at_.device});
    if (at_.ranks->node_count() > 1) options_.link = make_nccl_link(*nccl_, at_.ranks->make_link());
  }
  void TearDown() override {
    options_.link = nullptr;
    if (nccl_) nccl_->close();
  }

  rank_context at_;
  std::optional<nccl_communicator> nccl_;
  channel_options options_{.chunk_bytes = 64_KiB, .chunks = 2};
};

TEST_F(nccl_link, all_to_all_v_crosses_nodes_in_stream_order) {
  options_.check_counts = true;
  run_skewed_all_to_all(at_, options_);
}

TEST_F(nccl_link, carries_what_crosses_nodes_in_an_expert_parallel_exchange) {
  run_random_exchanges(at_, 20, 21, options_);
}

TEST_F(nccl_link, carries_what_crosses_nodes_in_low_latency_rounds) {
  run_random_low_latency(at_, 20, 22, options_);
}

}  // namespace
}  // namespace evmm::test
