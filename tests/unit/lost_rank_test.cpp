// SPDX-License-Identifier: Apache-2.0
#include "tests/support/directory_store.hpp"
#include "tests/support/lost_growth.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <filesystem>
#include <fstream>
#include <functional>
#include <vector>

#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {
namespace {

/// What a rank finds wrong.
using view = std::function<std::string(const std::shared_ptr<bootstrap>&)>;

/// Runs `body` in a process of its own. Nothing of the test program runs there: not its clean-up,
/// nor the rest of its tests.
pid_t start(const std::function<std::string()>& body, const std::string& name) {
  const pid_t child = ::fork();
  if (child != 0) return child;
  std::string wrong;
  try {
    wrong = body();
  } catch (const std::exception& failure) {
    wrong = failure.what();
  }
  if (!wrong.empty()) std::fprintf(stderr, "%s: %s\n", name.c_str(), wrong.c_str());
  ::_exit(wrong.empty() ? 0 : 1);
}

/// Ranks as processes without an mpirun that would end them all. What is wrong with their ends.
std::string lose_a_rank(int size, rank_id victim, const view& sees) {
  const directory_store store;
  std::vector<pid_t> processes;
  for (int rank = 0; rank < size; ++rank) {
    processes.push_back(
        start([&] { return sees(make_store_bootstrap(rank_id{rank}, size, store.face())); },
              "rank " + std::to_string(rank)));
    if (processes.back() < 0) return "cannot fork";
  }
  std::string wrong;
  for (int rank = 0; rank < size; ++rank) {
    int status = 0;
    ::waitpid(processes[static_cast<std::size_t>(rank)], &status, 0);
    const bool as_it_must_be = rank == victim.value
                                   ? WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL
                                   : WIFEXITED(status) && WEXITSTATUS(status) == 0;
    if (!as_it_must_be) wrong += "rank " + std::to_string(rank) + " ended wrongly; ";
  }
  return wrong;
}

view of_an_exchange(rank_id victim, death when) {
  return [=](const auto& ranks) { return see_a_rank_die(ranks, victim, when); };
}

TEST(lost_rank, is_named_by_all_others_when_it_shared_nothing) {
  EXPECT_EQ(lose_a_rank(2, {0}, of_an_exchange({0}, death::at_its_export)), "");
  EXPECT_EQ(lose_a_rank(4, {2}, of_an_exchange({2}, death::at_its_export)), "");
}

TEST(lost_rank, is_named_by_all_others_when_it_shared_everything) {
  EXPECT_EQ(lose_a_rank(4, {0}, of_an_exchange({0}, death::at_its_import)), "");
}

// --- a region that grows ------------------------------------------------------------------------

/// Sockets by name and files of shared memory that this process's namespaces hold.
std::string left_behind() {
  std::string found;
  std::ifstream sockets("/proc/self/net/unix");
  for (std::string line; std::getline(sockets, line);) {
    if (line.find('@') != std::string::npos) found += line + "; ";
  }
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    found += file.path().string() + "; ";
  }
  return found;
}

/// Gives the process a network and a /dev/shm in which nobody else leaves anything.
bool move_out() {
  return ::unshare(CLONE_NEWNET | CLONE_NEWNS) == 0 &&
         ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("tmpfs", "/dev/shm", "tmpfs", 0, "size=64m") == 0;
}

TEST(lost_rank, a_growth_names_it_at_each_step_and_leaves_nothing) {
  constexpr int size = 8;
  constexpr int k_not_allowed = 77;
  // All side by side: most of the time they wait for their deadline.
  std::vector<pid_t> jobs;
  for (const growth_death& when : growth_deaths()) {
    const rank_id victim{static_cast<int>(jobs.size()) % size};
    jobs.push_back(start(
        [&]() -> std::string {
          const bool alone = move_out();
          const auto wrong = lose_a_rank(size, victim, [&](const auto& ranks) {
            return see_a_growth_lose_a_rank(ranks, victim, when);
          });
          if (!wrong.empty()) return wrong;
          if (!alone) ::_exit(k_not_allowed);
          const auto left = left_behind();
          return left.empty() ? "" : "left behind: " + left;
        },
        "killed at " + when.name));
    ASSERT_GT(jobs.back(), 0);
  }
  bool looked = true;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    int status = 0;
    ASSERT_EQ(::waitpid(jobs[i], &status, 0), jobs[i]);
    ASSERT_TRUE(WIFEXITED(status));
    if (WEXITSTATUS(status) == k_not_allowed) {
      looked = false;
    } else {
      EXPECT_EQ(WEXITSTATUS(status), 0) << growth_deaths()[i].name;
    }
  }
  if (!looked) {
    GTEST_SKIP() << "all ranks saw it; what they leave cannot be told here from what others leave: "
                    "no namespaces may be made";
  }
}

}  // namespace
}  // namespace evmm::test
