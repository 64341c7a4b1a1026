// SPDX-License-Identifier: Apache-2.0
#include "lib/support/fork_guard.hpp"

#include <evmm/error.hpp>

#include <gtest/gtest.h>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm {
namespace {

TEST(fork_guard, tells_a_child_from_the_process_that_made_it) {
  const fork_guard here;
  EXPECT_FALSE(here.forked());
  here.check();
  const pid_t child = ::fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    bool refused = false;
    try {
      here.check();
    } catch (const invalid_argument&) {
      refused = true;
    }
    ::_exit(refused && here.forked() && !fork_guard().forked() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status));
  EXPECT_EQ(WEXITSTATUS(status), 0);
  EXPECT_FALSE(here.forked());
}

}  // namespace
}  // namespace evmm
