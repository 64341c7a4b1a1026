// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.hpp"
#include "lib/support/environment.hpp"
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/fake_nccl.hpp"
#include "tests/support/nccl_cases.hpp"

#include <evmm/driver.hpp>

#include <gtest/gtest.h>

#include <string>

#include <dlfcn.h>

namespace evmm::test {
namespace {

/// What the fake NCCL has left, where that is the one that was found.
void expect_nothing_left() {
  void* const library = ::dlopen(load_nccl().path.c_str(), RTLD_NOW | RTLD_NOLOAD);
  const auto count = reinterpret_cast<fake_nccl_counts (*)()>(::dlsym(library, "fake_nccl_count"));
  if (count == nullptr) return;
  const fake_nccl_counts left = count();
  EXPECT_EQ(left.communicators, 0);
  EXPECT_EQ(left.windows, 0);
  EXPECT_EQ(left.buffers, 0);
  EXPECT_GT(left.registrations, 0);
  EXPECT_EQ(left.remapped, 0);
  EXPECT_EQ(left.registered_before_any, 0);
}

class nccl_processes : public ::testing::TestWithParam<symmetric_case> {};

TEST_P(nccl_processes, holds) {
  std::string why_not;
  const bool cuda = environment("EVMM_DRIVER") == "cuda";
  if (cuda && !cuda_available(&why_not)) GTEST_SKIP() << why_not;
  if (!load_nccl().why_not.empty()) GTEST_SKIP() << load_nccl().why_not;
  const auto on = default_driver();
  // NCCL refuses ranks that share a GPU.
  if (cuda && on->device_count() < static_cast<int>(world()->node_ranks().size())) {
    GTEST_SKIP() << "a GPU for each rank is needed, " << on->device_count() << " are here";
  }
  GetParam().run(
      {.ranks = world(), .on = on, .device = {world()->node_rank() % on->device_count()}});
  world()->barrier("test: done");
  expect_nothing_left();
}

INSTANTIATE_TEST_SUITE_P(windows, nccl_processes, ::testing::ValuesIn(nccl_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evmm::test
