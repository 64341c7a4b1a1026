// SPDX-License-Identifier: Apache-2.0
// main of the tests that run under mpirun: rank 0 prints the usual report, the others print only
// what fails, with their rank; all return the worst code.
#include "tests/mpi/mpi_main.hpp"

#include <gtest/gtest.h>
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>

namespace evmm::test {

namespace {
std::shared_ptr<bootstrap>& world_slot() {
  static std::shared_ptr<bootstrap> slot;
  return slot;
}

class failure_printer final : public testing::EmptyTestEventListener {
  // GoogleTest is locked while it reports a part: it cannot be asked which test runs.
  const testing::TestInfo* running_ = nullptr;

  void OnTestStart(const testing::TestInfo& test) override { running_ = &test; }
  void OnTestEnd(const testing::TestInfo&) override { running_ = nullptr; }
  void OnTestPartResult(const testing::TestPartResult& result) override {
    if (!result.failed()) return;
    const auto* const test = running_;
    std::fprintf(stderr, "[rank %d] %s.%s: %s:%d: %s\n", world()->rank().value,
                 test == nullptr ? "?" : test->test_suite_name(),
                 test == nullptr ? "?" : test->name(),
                 result.file_name() == nullptr ? "?" : result.file_name(), result.line_number(),
                 result.message());
  }
};

// Ranks that report into one folder would all choose the same file name there.
void name_report_by_rank() {
  const char* folder = std::getenv("GTEST_OUTPUT");
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (folder == nullptr || rank == nullptr || !std::string_view(folder).ends_with('/')) return;
  GTEST_FLAG_SET(output, folder + ("rank" + std::string(rank) + ".xml"));
}

// Ranks of one machine that are to count as several nodes: so many each.
void pretend_nodes() {
  const char* ranks_a_node = std::getenv("EVMM_TEST_RANKS_A_NODE");
  const char* rank = std::getenv("OMPI_COMM_WORLD_RANK");
  if (ranks_a_node == nullptr || rank == nullptr) return;
  const std::string node = std::to_string(std::atoi(rank) / std::atoi(ranks_a_node));
  setenv("EVMM_HOST_ID", node.c_str(), 1);
}

int run() {
  auto& listeners = testing::UnitTest::GetInstance()->listeners();
  if (world()->rank().value != 0) delete listeners.Release(listeners.default_result_printer());
  listeners.Append(new failure_printer);
  int code = RUN_ALL_TESTS();
  const int skipped = testing::UnitTest::GetInstance()->skipped_test_count();
  const char* strict = std::getenv("EVMM_FAIL_ON_SKIP");
  if (skipped > 0 && strict != nullptr && std::string_view(strict) == "1") code = std::max(code, 1);
  const auto codes = world()->all_gather_value(code, "exit codes");
  return *std::max_element(codes.begin(), codes.end());
}
}  // namespace

const std::shared_ptr<bootstrap>& world() {
  return world_slot();
}

}  // namespace evmm::test

int main(int argc, char** argv) {
  // A rank that fails in the middle of a collective call must not hold the others for long.
  setenv("EVMM_TIMEOUT_MS", "20000", 0);
  evmm::test::name_report_by_rank();
  evmm::test::pretend_nodes();
  testing::InitGoogleTest(&argc, argv);
  int code = 1;
  try {
    evmm::test::world_slot() = evmm::make_mpi_bootstrap();
    code = evmm::test::run();
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "the ranks lost each other: %s\n", failure.what());
    return code;
  }
  evmm::test::world_slot().reset();
  // At exit the library leaves MPI alone when a step was lost, as tests do on purpose; all ranks
  // are here, though, and mpirun wants to see the end of MPI.
  MPI_Finalize();
  return code;
}
