// SPDX-License-Identifier: Apache-2.0
// A rank is killed during an exchange under mpirun, which must be told to let the others live.
// Each survivor prints a line that CTest counts; see CMakeLists.txt.
#include "tests/support/lost_rank.hpp"

#include <cstdio>
#include <string>

#include <unistd.h>

int main() {
  int rank = -1;
  std::string wrong;
  try {
    const auto ranks = evmm::make_mpi_bootstrap();
    rank = ranks->rank().value;
    wrong = evmm::test::see_a_rank_die(ranks, evmm::rank_id{2}, evmm::test::death::at_its_export);
  } catch (const std::exception& failure) {
    wrong = failure.what();
  }
  std::printf("survivor %d: %s\n", rank, wrong.empty() ? "as it must be" : wrong.c_str());
  std::fflush(stdout);
  return wrong.empty() ? 0 : 1;
}
