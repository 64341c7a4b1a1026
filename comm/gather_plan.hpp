// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>

namespace evmm {

/// How the bootstrap over MPI gathers: in each round a rank passes on what it holds, so that the
/// ranks behind it hold twice as many blocks. Few messages and few connections a rank, at any
/// number of ranks: with one to every other rank, sockets and messages would grow with their
/// square.
struct gather_plan {
  int ranks = 1;

  /// Rounds of a step, each with one message sent and one received: the rounded-up log2.
  constexpr int rounds() const {
    int count = 0;
    while ((1LL << count) < ranks) ++count;
    return count;
  }
  /// Blocks in the message of a round: the sender's own and those of the ranks ahead of it.
  constexpr int blocks(int round) const { return std::min(1 << round, ranks - (1 << round)); }
  constexpr int receiver(int rank, int round) const {
    return (rank + ranks - (1 << round) % ranks) % ranks;
  }
  constexpr int sender(int rank, int round) const { return (rank + (1 << round)) % ranks; }
  /// Ranks that a rank ever talks to, unless one is lost.
  constexpr int neighbours() const { return std::min(2 * rounds(), ranks - 1); }
};

}  // namespace evmm
