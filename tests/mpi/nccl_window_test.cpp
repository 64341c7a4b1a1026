// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.hpp"
#include "lib/support/environment.hpp"
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/fake_nccl.hpp"
#include "tests/support/nccl_cases.hpp"
#include "tests/support/scoped_variable.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/nccl_window.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>

#include <dlfcn.h>

namespace evmm::test {
namespace {

using namespace evmm::units;
using testing::AllOf;
using testing::HasSubstr;
using testing::StartsWith;

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

/// NCCL goes by each process's own environment.
TEST(nccl_environment, of_one_rank_that_forbids_a_window_forbids_it_on_all) {
  if (!load_nccl().why_not.empty()) GTEST_SKIP() << load_nccl().why_not;
  if (environment("EVMM_DRIVER") == "cuda") GTEST_SKIP() << "NCCL itself reads the variable once";
  const auto on = default_driver();
  const device_id device{world()->node_rank() % on->device_count()};
  symmetric_region region(world(), on, {.device = device, .reserve = 8_MiB});
  region.grow(tier::device, 2_MiB);
  region.grow(tier::host, 2_MiB);
  nccl_communicator nccl(world(), on, {.device = device});
  const std::string why_not = nccl.why_not(nccl_ability::host_segments);
  if (!why_not.empty()) GTEST_SKIP() << why_not;
  const int last = world()->size() - 1;
  {
    std::optional<scoped_variable> forbidden;
    if (world()->rank() == rank_id{last}) forbidden.emplace("NCCL_ELASTIC_BUFFER_REGISTER", "0");
    const std::string said = thrown_by_all(*world(), [&] { nccl_window(nccl, region); });
    EXPECT_THAT(said, AllOf(StartsWith("unsupported: rank " + std::to_string(last) + ": segment 1"),
                            HasSubstr("NCCL_ELASTIC_BUFFER_REGISTER=0 forbids")));
  }
  EXPECT_EQ(thrown_by_all(*world(), [&] { nccl_window(nccl, region); }), "");
  nccl.close();
  region.close();
}

INSTANTIATE_TEST_SUITE_P(windows, nccl_processes, ::testing::ValuesIn(nccl_cases()),
                         [](const auto& info) { return info.param.name; });

}  // namespace
}  // namespace evmm::test
