// SPDX-License-Identifier: Apache-2.0
// NCCL between nodes: ranks of this machine that count as several, for evmm and for NCCL alike.
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/channel_cases.hpp"

#include <evmm/comm/nccl_link.hpp>
#include <evmm/driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>

namespace evmm::test {
namespace {

using namespace evmm::units;

TEST(nccl_link, all_to_all_v_crosses_nodes_in_stream_order) {
  std::string why_not;
  if (!cuda_available(&why_not)) GTEST_SKIP() << why_not;
  const auto on = default_driver();
  const auto ranks = world();
  if (on->device_count() < ranks->size()) {
    GTEST_SKIP() << ranks->size() << " ranks need as many GPUs, there are " << on->device_count();
  }
  // NCCL tells hosts apart by this, before anything of it runs, and takes its network between them.
  setenv("NCCL_HOSTID", ("evmm-test-" + std::to_string(ranks->node())).c_str(), 1);
  const device_id device{ranks->rank().value};
  nccl_communicator nccl(ranks, on, {.device = device});
  channel_options options{.chunk_bytes = 64_KiB, .chunks = 2, .check_counts = true};
  if (ranks->node_count() > 1) options.link = make_nccl_link(nccl, ranks->make_link());
  run_skewed_all_to_all({.ranks = ranks, .on = on, .device = device}, options);
  options.link = nullptr;
  nccl.close();
}

}  // namespace
}  // namespace evmm::test
