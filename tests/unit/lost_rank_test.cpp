// SPDX-License-Identifier: Apache-2.0
#include "tests/support/lost_rank.hpp"

#include "tests/support/directory_store.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {
namespace {

/// Ranks as processes without an mpirun that would end them all.
void lose_a_rank(int size, rank_id victim, death when) {
  const directory_store store;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child != 0) {
      processes.push_back(child);
      continue;
    }
    // Nothing of the test program runs here: not its clean-up, nor the rest of its tests.
    std::string wrong;
    try {
      wrong = see_a_rank_die(make_store_bootstrap(rank_id{rank}, size, store.face()), victim, when);
    } catch (const std::exception& failure) {
      wrong = failure.what();
    }
    if (!wrong.empty()) std::fprintf(stderr, "rank %d: %s\n", rank, wrong.c_str());
    ::_exit(wrong.empty() ? 0 : 1);
  }
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    ASSERT_EQ(::waitpid(processes[static_cast<std::size_t>(rank)], &status, 0),
              processes[static_cast<std::size_t>(rank)]);
    if (rank == victim.value) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    } else {
      EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "rank " << rank;
    }
  }
}

TEST(lost_rank, is_named_by_all_others_when_it_shared_nothing) {
  lose_a_rank(2, rank_id{0}, death::at_its_export);
  lose_a_rank(4, rank_id{2}, death::at_its_export);
}

TEST(lost_rank, is_named_by_all_others_when_it_shared_everything) {
  lose_a_rank(4, rank_id{0}, death::at_its_import);
}

}  // namespace
}  // namespace evmm::test
