// SPDX-License-Identifier: Apache-2.0
// A rank is killed under mpirun, which must be told to let the others live: in an exchange of
// handles, in a step of a region's growth, or before a channel's barrier, as the argument says.
// Each survivor prints a line that CTest counts; see CMakeLists.txt.
#include "tests/support/lost_growth.hpp"

#include <cstdio>
#include <stdexcept>
#include <string>

namespace evmm::test {
namespace {

std::string see(const std::shared_ptr<bootstrap>& ranks, const std::string& what) {
  constexpr rank_id victim{2};
  if (what == "exchange") return see_a_rank_die(ranks, victim, death::at_its_export);
  if (what == "channel") return see_a_channel_lose_a_rank(ranks, victim);
  for (const growth_death& when : growth_deaths()) {
    if (when.name == what) return see_a_growth_lose_a_rank(ranks, victim, when);
  }
  throw std::runtime_error("there is no way to die called " + what);
}

}  // namespace
}  // namespace evmm::test

int main(int, char** argv) {
  int rank = -1;
  std::string wrong;
  try {
    const auto ranks = evmm::make_mpi_bootstrap();
    rank = ranks->rank().value;
    wrong = evmm::test::see(ranks, argv[1]);
  } catch (const std::exception& failure) {
    wrong = failure.what();
  }
  std::printf("survivor %d: %s\n", rank, wrong.empty() ? "as it must be" : wrong.c_str());
  std::fflush(stdout);
  return wrong.empty() ? 0 : 1;
}
