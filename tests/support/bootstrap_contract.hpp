// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <string>

// What every bootstrap must do, written as one rank sees it: all ranks call each function. The unit
// tests run it on threads, the MPI tests in processes.

namespace evmm::test {

inline std::vector<std::byte> some_bytes(std::size_t size, int seed) {
  std::vector<std::byte> bytes(size);
  for (std::size_t i = 0; i < size; ++i) {
    bytes[i] = static_cast<std::byte>(i * 7 + static_cast<std::size_t>(seed) * 31 + (i >> 8));
  }
  return bytes;
}

inline void check_gathers(bootstrap& ranks) {
  const int rank = ranks.rank().value;
  // Lengths that differ by rank, empty ones too, and some too long for any eager protocol.
  for (const std::size_t unit : {0, 1, 1000, 300'000}) {
    const auto gathered = ranks.all_gather(some_bytes(unit * static_cast<std::size_t>(rank), rank));
    ASSERT_EQ(gathered.size(), static_cast<std::size_t>(ranks.size()));
    for (int r = 0; r < ranks.size(); ++r) {
      EXPECT_EQ(gathered[static_cast<std::size_t>(r)],
                some_bytes(unit * static_cast<std::size_t>(r), r));
    }
  }
  std::vector<int> expected(static_cast<std::size_t>(ranks.size()));
  std::iota(expected.begin(), expected.end(), 100);
  for (int repeat = 0; repeat < 50; ++repeat) {
    EXPECT_EQ(ranks.all_gather_value(rank + 100), expected);
    ranks.barrier();
  }
}

inline void check_broadcasts(bootstrap& ranks) {
  for (int root = 0; root < ranks.size(); ++root) {
    const auto sent = some_bytes(17, root);
    const auto mine = ranks.rank().value == root ? sent : some_bytes(3, 99);
    EXPECT_EQ(ranks.broadcast(mine, rank_id{root}), sent);
  }
  EXPECT_THROW(ranks.broadcast({}, rank_id{ranks.size()}), invalid_argument);
  EXPECT_THROW(ranks.broadcast({}, rank_id{-1}), invalid_argument);
  EXPECT_FALSE(ranks.broken());
}

inline void check_agreement(bootstrap& ranks) {
  ranks.agree(nullptr);
  const int last = ranks.size() - 1;
  const auto failure = std::make_exception_ptr(out_of_memory("no room", "buy more", 2));
  const bool fails = ranks.rank().value == last;
  try {
    ranks.agree(fails ? failure : nullptr, "grow");
    ADD_FAILURE() << "agreed";
  } catch (const out_of_memory& failure) {
    EXPECT_EQ(failure.message(), "rank " + std::to_string(last) + ": no room");
    EXPECT_EQ(failure.help(), "buy more");
    EXPECT_EQ(failure.native_code(), 2);
  }
  // All fail, each in another way: the lowest rank's error is everybody's.
  std::exception_ptr mine = std::make_exception_ptr(unsupported("not here"));
  if (ranks.rank().value == 0) mine = std::make_exception_ptr(std::runtime_error("surprise"));
  try {
    ranks.agree(mine);
    ADD_FAILURE() << "agreed";
  } catch (const driver_error& failure) {
    const std::string others = last == 0 ? ""
                               : last == 1
                                   ? " (and 1 more rank failed)"
                                   : " (and " + std::to_string(last) + " more ranks failed)";
    EXPECT_EQ(failure.message(), "rank 0: surprise" + others);
  }
  // All fail, but only one by itself: who waited for it in vain does not speak for all.
  try {
    ranks.agree(fails ? failure : std::make_exception_ptr(timed_out("waited in vain")));
    ADD_FAILURE() << "agreed";
  } catch (const out_of_memory& failure) {
    EXPECT_THAT(failure.message(),
                testing::StartsWith("rank " + std::to_string(last) + ": no room"));
  }
  EXPECT_THROW(ranks.agree(std::make_exception_ptr(timed_out("all in vain"))), timed_out);
  ranks.agree(nullptr);
}

/// Needs two ranks at least.
inline void check_divergence(bootstrap& ranks) {
  const bool last = ranks.rank().value == ranks.size() - 1;
  const auto text = thrown_by([&] {
    if (last) {
      ranks.barrier("shrink");
    } else {
      ranks.agree(nullptr, "grow");
    }
  });
  EXPECT_THAT(text, testing::StartsWith("peer_error: ranks make different calls: rank 0 is in "
                                        "agree 'grow' (step "));
  EXPECT_THAT(text, testing::HasSubstr("rank " + std::to_string(ranks.size() - 1) +
                                       " in barrier 'shrink' (step "));
  EXPECT_THAT(thrown_by([&] { ranks.broadcast({}, rank_id{last ? 0 : 1}); }),
              testing::HasSubstr("rank 0 expects it from rank 1, rank " +
                                 std::to_string(ranks.size() - 1) + " from rank 0"));
  EXPECT_THAT(thrown_by([&] { ranks.broadcast({}, rank_id{last ? 99 : 0}); }),
              testing::StartsWith("invalid_argument: broadcast: rank " +
                                  std::to_string(ranks.size() - 1) + " expects it from rank 99"));
  ranks.barrier();  // they are in step again
}

/// The last rank stays away from a step of `lost` until the others, which meet it through `world`
/// afterwards, have given up. Needs two ranks at least; `lost` is broken afterwards.
inline void check_absence(bootstrap& lost, bootstrap& world) {
  const int absent = lost.size() - 1;
  const auto named = testing::StartsWith("timed_out: rank " + std::to_string(absent) +
                                         " did not arrive in barrier 'tea' within ");
  lost.set_timeout(std::chrono::milliseconds(300));
  if (lost.rank().value == absent) {
    world.barrier("given up");
    // Late: the others are gone, and this one learns it at once rather than after its own timeout.
    lost.set_timeout(std::chrono::minutes(10));
    EXPECT_THAT(thrown_by([&] { lost.barrier("tea"); }), named);
  } else {
    const auto since = std::chrono::steady_clock::now();
    EXPECT_THAT(thrown_by([&] { lost.barrier("tea"); }), named);
    EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(10));
    world.barrier("given up");
  }
  EXPECT_TRUE(lost.broken());
  EXPECT_THAT(thrown_by([&] { lost.agree(nullptr); }),
              testing::AllOf(testing::StartsWith("peer_error: agree cannot start: "),
                             testing::HasSubstr("rank " + std::to_string(absent) + " did not")));
}

}  // namespace evmm::test
