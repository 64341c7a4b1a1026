// SPDX-License-Identifier: Apache-2.0
#include "tests/support/exchange_contract.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/handle_exchange.hpp>
#include <evmm/host_driver.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <memory>

namespace evmm::test {
namespace {

using testing::AllOf;
using testing::AnyOf;
using testing::HasSubstr;
using testing::StartsWith;

std::shared_ptr<fault_driver> machine(bool fabric = false) {
  return fault_driver::make(
      host_driver::make({.host_bytes = std::size_t{1} << 32, .fabric = fabric}));
}

/// A rank that is a thread, with a machine of its own as a process would have.
struct rank_here {
  bootstrap& ranks;
  fault_driver& on;
  handle_exchange& exchange;
};

/// Runs `body` on each rank of a connected exchange, and expects it to throw nothing and to leave
/// nothing behind.
void on_connected_ranks(std::vector<std::shared_ptr<bootstrap>> ranks,
                        const std::function<void(rank_here)>& body, bool fabric = false) {
  std::vector<std::shared_ptr<fault_driver>> machines;
  for (std::size_t i = 0; i < ranks.size(); ++i) machines.push_back(machine(fabric));
  const auto before = machines[0]->alive();
  const auto thrown = run_ranks(static_cast<int>(ranks.size()), [&](int rank) {
    const auto& mine = ranks[static_cast<std::size_t>(rank)];
    const auto& on = machines[static_cast<std::size_t>(rank)];
    handle_exchange exchange(mine, on);
    body({*mine, *on, exchange});
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
  for (const auto& on : machines) EXPECT_EQ(on->alive(), before);
}

class handle_exchange_of : public testing::TestWithParam<std::tuple<int, bool>> {
 protected:
  int size() const { return std::get<0>(GetParam()); }
  bool fabric() const { return std::get<1>(GetParam()); }
};

TEST_P(handle_exchange_of, shares_memory_both_ways) {
  on_connected_ranks(
      make_thread_bootstraps(size()),
      [this](rank_here self) {
        EXPECT_EQ(self.exchange.transport(), fabric() ? share_kind::fabric : share_kind::fd);
        for (const std::size_t count : {1, 0, 7}) {
          check_exchange(self.ranks, self.on, self.exchange, count);
        }
        check_exchange(self.ranks, self.on, self.exchange, 3, true);
      },
      fabric());
}

TEST_P(handle_exchange_of, reports_a_refusal_and_goes_on) {
  if (size() == 1) return;
  on_connected_ranks(
      make_thread_bootstraps(size()),
      [](rank_here self) { check_refusal(self.ranks, self.on, self.exchange); }, fabric());
}

INSTANTIATE_TEST_SUITE_P(ranks, handle_exchange_of,
                         testing::Combine(testing::Values(1, 2, 4), testing::Bool()),
                         [](const auto& info) {
                           return std::to_string(std::get<0>(info.param)) +
                                  (std::get<1>(info.param) ? "_fabric" : "_fd");
                         });

TEST(handle_exchange, takes_more_handles_than_one_packet_holds) {
  on_connected_ranks(make_thread_bootstraps(3), [](rank_here self) {
    check_exchange(self.ranks, self.on, self.exchange, 150);
    check_exchange(self.ranks, self.on, self.exchange, 64, true);
  });
}

TEST(handle_exchange, connects_each_node_alone) {
  on_connected_ranks(make_thread_bootstraps(5, {"a", "b", "a", "b", "c"}),
                     [](rank_here self) { check_exchange(self.ranks, self.on, self.exchange, 2); });
}

TEST(handle_exchange, uses_fabric_only_where_every_rank_of_the_node_has_it) {
  const auto ranks = make_thread_bootstraps(4, {"a", "a", "b", "b"});
  const auto thrown = run_ranks(4, [&](int rank) {
    const auto on = machine(rank != 1);
    handle_exchange exchange(ranks[static_cast<std::size_t>(rank)], on);
    EXPECT_EQ(exchange.transport(), rank < 2 ? share_kind::fd : share_kind::fabric);
    if (rank != 0) return;
    // Such memory would reach nobody, so it is refused where it was made.
    const auto mine = some_memory(*on, 1, share_kind::fabric);
    EXPECT_THAT(thrown_by([&] { exchange.exchange(pointers(mine)); }),
                AnyOf(StartsWith("invalid_argument: memory of DEVICE 0"),
                      StartsWith("peer_error: rank 1 closed its connection")));
  });
  for (const auto& failure : thrown) EXPECT_EQ(what(failure), "");
}

/// A host driver that calls itself CUDA's.
class called_cuda final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  driver_info info() const override {
    driver_info told = forwarding_driver::info();
    told.kind = driver_kind::cuda;
    told.name = "cuda";
    return told;
  }
};

TEST(handle_exchange, ranks_of_a_node_have_one_kind_of_driver) {
  const auto ranks = make_thread_bootstraps(3, {"a", "b", "a"});
  const auto thrown = run_ranks(3, [&](int rank) {
    std::shared_ptr<driver> on = machine();
    if (rank == 0) on = std::make_shared<called_cuda>(on);
    handle_exchange(ranks[static_cast<std::size_t>(rank)], on);
  });
  for (const auto& failure : thrown) {
    EXPECT_THAT(what(failure),
                AllOf(StartsWith("invalid_argument: rank 0 has the cuda driver, rank 2 of the same "
                                 "node the host driver"),
                      HasSubstr("EVMM_DRIVER")));
  }
  EXPECT_FALSE(ranks[0]->broken());
}

TEST(handle_exchange, without_a_bootstrap_or_a_driver_is_refused) {
  const auto ranks = make_thread_bootstraps(2);
  for (const auto& each : ranks) each->set_timeout(std::chrono::milliseconds(1000));
  const auto thrown = run_ranks(2, [&](int rank) {
    const auto& mine = ranks[static_cast<std::size_t>(rank)];
    EXPECT_EQ(thrown_by([&] { handle_exchange(nullptr, machine()); }),
              "invalid_argument: a handle exchange without a bootstrap");
    handle_exchange(mine, rank == 1 ? nullptr : machine());
  });
  for (const auto& failure : thrown) {
    EXPECT_EQ(what(failure), "invalid_argument: rank 1: a handle exchange without a driver");
  }
}

TEST(handle_exchange, survives_each_driver_call_failing) {
  for (const std::size_t failing : {0u, 2u}) {
    on_connected_ranks(make_thread_bootstraps(3), [failing](rank_here self) {
      const bool fails = self.ranks.rank().value == static_cast<int>(failing);
      const auto mine = some_memory(self.on, 2, share_kind::fd);
      const auto before = self.on.alive();
      for (std::size_t nth = 0;; ++nth) {
        self.ranks.barrier("before");
        if (fails) self.on.fail_call(nth, error_category::out_of_memory);
        std::exception_ptr failure;
        try {
          const auto imported = self.exchange.exchange(pointers(mine));
        } catch (const error&) {
          failure = std::current_exception();
        }
        const auto agreed = thrown_by([&] { self.ranks.agree(failure); });
        const bool happened = self.ranks.all_gather_value(fails && self.on.disarm())[failing];
        const auto after = self.on.alive();
        EXPECT_EQ(after.handles, before.handles) << "after failing call " << nth;
        EXPECT_EQ(agreed.empty(), !happened) << agreed;
        if (!happened) {
          EXPECT_EQ(nth, 6u);  // two exports and four imports
          break;
        }
        // The failing rank's own error wins only when it is the lowest that failed.
        EXPECT_THAT(agreed,
                    HasSubstr(nth < 2 && failing != 0 ? "rank 0: rank 2 could not share its memory"
                                                      : "rank " + std::to_string(failing) + ": "));
      }
    });
  }
}

TEST(handle_exchange, lets_a_rank_leave_that_is_done) {
  for (int repeat = 0; repeat < 50; ++repeat) {
    on_connected_ranks(make_thread_bootstraps(4), [](rank_here self) {
      const auto mine = some_memory(self.on, 1, share_kind::fd);
      EXPECT_EQ(self.exchange.exchange(pointers(mine)).size(), 4u);
    });
  }
}

TEST(handle_exchange, names_a_rank_that_left) {
  on_connected_ranks(make_thread_bootstraps(3), [](rank_here self) {
    if (self.ranks.rank().value == 1) return;
    EXPECT_THAT(thrown_by([&] { self.exchange.exchange({}); }),
                StartsWith("peer_error: rank 1 closed its connection during an exchange"));
    EXPECT_THAT(thrown_by([&] { self.exchange.exchange({}); }),
                StartsWith("peer_error: handles cannot be exchanged any more: rank 1 closed"));
  });
}

TEST(handle_exchange, names_a_rank_that_stays_away) {
  auto met = make_thread_bootstraps(4);
  on_connected_ranks(make_thread_bootstraps(4), [&met](rank_here self) {
    self.ranks.set_timeout(std::chrono::milliseconds(600));
    const int rank = self.ranks.rank().value;
    if (rank != 2) {
      EXPECT_THAT(thrown_by([&] { self.exchange.exchange({}); }),
                  StartsWith("timed_out: rank 2 did not arrive in an exchange of handles within "
                             "0.3 s"));
    }
    met[static_cast<std::size_t>(rank)]->barrier();
    if (rank == 2) {
      // Late, it is told what the others saw.
      EXPECT_THAT(thrown_by([&] { self.exchange.exchange({}); }),
                  StartsWith("timed_out: rank 2 did not arrive"));
    }
  });
}

/// Ranks of other nodes wait in the step after the exchange.
TEST(handle_exchange, a_rank_that_stays_away_is_told_from_those_that_wait_for_it) {
  const auto there = make_thread_bootstraps(3);
  on_connected_ranks(make_thread_bootstraps(3, {"a", "a", "b"}), [&](rank_here self) {
    self.ranks.set_timeout(std::chrono::milliseconds(600));
    const int rank = self.ranks.rank().value;
    if (rank != 1) {
      std::exception_ptr failure;
      try {
        self.exchange.exchange({});
      } catch (...) {
        failure = std::current_exception();
      }
      EXPECT_EQ(failure != nullptr, rank == 0);
      EXPECT_THAT(thrown_by([&] { self.ranks.agree(failure, "after"); }),
                  StartsWith("timed_out: rank 1 did not arrive in agree 'after'"));
    }
    there[static_cast<std::size_t>(rank)]->barrier();
  });
}

TEST(handle_exchange, constructs_on_all_ranks_or_on_none) {
  const auto ranks = make_thread_bootstraps(3);
  const auto before = machine()->alive();
  const auto thrown = run_ranks(3, [&](int rank) {
    class unshared final : public forwarding_driver {
     public:
      using forwarding_driver::forwarding_driver;
      driver_info info() const override {
        auto told = forwarding_driver::info();
        told.fd_sharing = false;
        return told;
      }
    };
    std::shared_ptr<driver> on = machine();
    if (rank == 1) on = std::make_shared<unshared>(on);
    handle_exchange(ranks[static_cast<std::size_t>(rank)], on);
  });
  for (const auto& failure : thrown) {
    EXPECT_THAT(what(failure), StartsWith("unsupported: rank 1: the host driver cannot share"));
  }
  EXPECT_EQ(machine()->alive().descriptors, before.descriptors);
}

}  // namespace
}  // namespace evmm::test
