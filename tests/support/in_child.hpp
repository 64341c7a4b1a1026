// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <functional>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {

using variables = std::vector<std::pair<const char*, const char*>>;

/// Runs `body` in a child with these variables, for what a process reads once; the test fails where
/// the child's expectations do.
inline void in_child(const variables& environment, const std::function<void()>& body) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    for (const auto& [name, value] : environment) ::setenv(name, value, 1);
    try {
      body();
    } catch (const std::exception& failure) {
      ADD_FAILURE() << failure.what();
    }
    std::fflush(nullptr);
    ::_exit(testing::Test::HasFailure() ? 1 : 0);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << "the child failed: " << status;
}

}  // namespace evmm::test
