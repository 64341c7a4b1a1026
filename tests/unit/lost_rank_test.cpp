// SPDX-License-Identifier: Apache-2.0
#include "tests/support/lost_growth.hpp"
#include "tests/support/rank_processes.hpp"

#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

namespace evmm::test {
namespace {

using namespace evmm::units;

/// Runs `sees` as each rank and returns what is wrong with how they ended: the victim is killed,
/// and the others find nothing wrong.
std::string lose_a_rank(int size, rank_id victim,
                        const std::function<std::string(const std::shared_ptr<bootstrap>&)>& sees) {
  const auto ends = run_processes(size, sees);
  std::string wrong;
  for (int rank = 0; rank < size; ++rank) {
    const std::string& end = ends[static_cast<std::size_t>(rank)];
    const std::string expected = rank == victim.value ? "killed by signal 9" : "";
    if (end != expected) wrong += "rank " + std::to_string(rank) + ": '" + end + "'; ";
  }
  return wrong;
}

std::string lose_in_exchange(int size, rank_id victim, death when) {
  return lose_a_rank(size, victim,
                     [=](const auto& ranks) { return see_a_rank_die(ranks, victim, when); });
}

TEST(lost_rank, is_named_by_all_others_when_it_shared_nothing) {
  EXPECT_EQ(lose_in_exchange(2, {0}, death::at_its_export), "");
  EXPECT_EQ(lose_in_exchange(4, {2}, death::at_its_export), "");
}

TEST(lost_rank, is_named_by_all_others_when_it_shared_everything) {
  EXPECT_EQ(lose_in_exchange(4, {0}, death::at_its_import), "");
}

TEST(lost_rank, a_growth_names_it_at_each_step_and_leaves_nothing) {
  constexpr int size = 8;
  // All side by side: most of the time they wait for their deadline.
  std::vector<forked_process> jobs;
  for (const growth_death& when : growth_deaths()) {
    const rank_id victim{static_cast<int>(jobs.size()) % size};
    jobs.emplace_back([&]() -> std::string {
      const bool alone = move_out(64_MiB);
      const auto wrong = lose_a_rank(size, victim, [&](const auto& ranks) {
        return see_a_growth_lose_a_rank(ranks, victim, when);
      });
      return wrong + (alone ? left_behind() : k_cannot);
    });
  }
  bool looked = true;
  for (std::size_t i = 0; i < jobs.size(); ++i) {
    const auto end = jobs[i].end();
    if (end == k_cannot) {
      looked = false;
    } else {
      EXPECT_EQ(end, "") << "killed at " << growth_deaths()[i].name;
    }
  }
  if (!looked) {
    GTEST_SKIP() << "all ranks saw it; what they left cannot be told from what others leave: no "
                    "namespaces may be made here";
  }
}

}  // namespace
}  // namespace evmm::test
