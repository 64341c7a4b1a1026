// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/bootstrap_contract.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {
namespace {

TEST(mpi_bootstrap, gathers_bytes_of_any_length) {
  check_gathers(*world());
}

TEST(mpi_bootstrap, broadcasts_from_any_root) {
  check_broadcasts(*world());
}

TEST(mpi_bootstrap, agrees_on_one_error) {
  check_agreement(*world());
}

TEST(mpi_bootstrap, tells_ranks_that_diverge_apart) {
  if (world()->size() > 1) check_divergence(*world());
}

TEST(mpi_bootstrap, names_ranks_that_do_not_arrive) {
  const auto lost = make_mpi_bootstrap();
  if (lost->size() > 1) check_absence(*lost, *world());
}

TEST(mpi_bootstrap, names_all_that_do_not_arrive_and_nobody_behind_them) {
  const auto lost = make_mpi_bootstrap();
  if (lost->size() < 8) return;
  const std::vector<int> absent = {1, 2, 6};
  const int me = lost->rank().value;
  const auto said = [&] { return thrown_by([&] { lost->barrier("tea"); }); };
  const auto named = testing::StartsWith(
      "timed_out: ranks 1, 2 and 6 did not arrive in barrier 'tea' within 0.3 s");
  lost->set_timeout(std::chrono::milliseconds(300));
  const bool late = std::find(absent.begin(), absent.end(), me) != absent.end();
  if (late) world()->barrier("given up");
  EXPECT_THAT(said(), named);
  if (!late) world()->barrier("given up");
}

TEST(mpi_bootstrap, a_timeout_that_one_rank_cannot_read_fails_all_and_soon) {
  const auto before = environment("EVMM_TIMEOUT_MS");
  const int last = world()->size() - 1;
  if (world()->rank().value == last) setenv("EVMM_TIMEOUT_MS", "soon", 1);
  const auto since = std::chrono::steady_clock::now();
  EXPECT_THAT(thrown_by([] { make_mpi_bootstrap(); }),
              testing::StartsWith("invalid_argument: rank " + std::to_string(last) +
                                  ": EVMM_TIMEOUT_MS is 'soon'"));
  EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(10));
  unsetenv("EVMM_TIMEOUT_MS");
  if (before) setenv("EVMM_TIMEOUT_MS", before->c_str(), 1);
}

TEST(mpi_bootstrap, a_forked_child_that_ends_leaves_mpi_alone) {
  auto other = make_mpi_bootstrap();
  other->barrier();
  std::fflush(nullptr);
  const pid_t child = fork();
  ASSERT_NE(child, -1);
  if (child == 0) {
    alarm(20);  // rather than wait for ranks that know nothing of it
    other.reset();
    std::exit(0);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  other->barrier();
}

TEST(mpi_bootstrap, finds_its_nodes) {
  const auto nodes =  // many_hosts.sh says how many
      static_cast<int>(environment_integer("EVMM_TEST_NODES", 1, world()->size()).value_or(1));
  EXPECT_EQ(world()->node_count(), nodes);
  const int on_each = world()->size() / nodes;
  EXPECT_EQ(world()->node_ranks().size(), static_cast<std::size_t>(on_each));
  EXPECT_EQ(world()->node_rank(), world()->rank().value % on_each);
}

TEST(mpi_bootstrap, two_do_not_mix) {
  const auto other = make_mpi_bootstrap();
  // Each rank is in both, in an order that would confuse messages on one communicator.
  EXPECT_EQ(other->all_gather_value(1),
            std::vector<int>(static_cast<std::size_t>(other->size()), 1));
  check_gathers(*world());
  check_gathers(*other);
}

}  // namespace
}  // namespace evmm::test
