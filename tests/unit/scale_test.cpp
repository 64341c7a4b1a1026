// SPDX-License-Identifier: Apache-2.0
// A job of 1,024 ranks, as threads of this process: real handshakes, real exchanges of handles,
// real growth, of a region each.
#include "comm/footprint.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_region.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <iterator>
#include <string>
#include <vector>

#include <sys/resource.h>

namespace evmm::test {
namespace {

using namespace evmm::units;

std::size_t open_descriptors() {
  const std::filesystem::directory_iterator all("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(all), end(all)));
}

/// The descriptors that a rank holds once its region has `segments`: a socket to each other rank of
/// its node, and, on the host driver alone, one for each handle, its own and theirs.
std::size_t descriptors_of_a_rank(std::size_t ranks_a_node, std::size_t segments) {
  return exchange_sockets(ranks_a_node) + segments + imported_handles(ranks_a_node, segments);
}

TEST(scale, a_thousand_ranks_share_and_grow) {
#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
  GTEST_SKIP() << "a thousand threads are too many for a sanitizer";
#endif
  constexpr int nodes = 128;
  constexpr int ranks_a_node = 8;
  constexpr int size = nodes * ranks_a_node;
  constexpr std::size_t segments = 1;
  // While they connect and exchange, two more: who listens, and what is handed out.
  const std::size_t needed = size * (descriptors_of_a_rank(ranks_a_node, segments) + 2);
  rlimit limit{};
  ASSERT_EQ(::getrlimit(RLIMIT_NOFILE, &limit), 0);
  if (limit.rlim_max < needed + 100) {
    GTEST_SKIP() << needed << " descriptors are needed in one process, of which " << limit.rlim_max
                 << " are allowed (ulimit -Hn)";
  }
  std::vector<std::string> hosts;
  for (int r = 0; r < size; ++r) hosts.push_back(std::to_string(r / ranks_a_node));
  const auto bootstraps = make_thread_bootstraps(size, hosts);
  for (const auto& each : bootstraps) each->set_timeout(std::chrono::seconds(60));
  std::atomic<std::size_t> held = 0;
  std::atomic<int> wrong = 0;
  const auto before = open_descriptors();
  const auto since = std::chrono::steady_clock::now();
  std::chrono::duration<double> made{};
  std::chrono::duration<double> grown{};
  const auto thrown = run_ranks(size, [&](int rank) {
    const auto& ranks = bootstraps[static_cast<std::size_t>(rank)];
    symmetric_region region(ranks, host_driver::make({}), {.reserve = 64_MiB});
    if (rank == 0) made = std::chrono::steady_clock::now() - since;
    region.grow(tier::device, 2_MiB);
    if (rank == 0) grown = std::chrono::steady_clock::now() - since;
    *reinterpret_cast<int*>(region.local()) = rank;
    ranks->barrier("test: written");
    for (const rank_id peer : ranks->node_ranks()) {
      if (*reinterpret_cast<const int*>(region.peer(peer)) != peer.value) ++wrong;
    }
    if (rank == 0) held = open_descriptors() - before;
    ranks->barrier("test: read");
    region.close();
  });
  for (const auto& failure : thrown) ASSERT_EQ(what(failure), "");
  EXPECT_EQ(wrong, 0);
  EXPECT_EQ(held, size * descriptors_of_a_rank(ranks_a_node, segments));
  const std::chrono::duration<double> all = std::chrono::steady_clock::now() - since;
  std::printf(
      "%d ranks on %d nodes: made in %.2f s, grown in %.2f s, all in %.2f s; %zu descriptors\n",
      size, nodes, made.count(), (grown - made).count(), all.count(), held.load());
}

}  // namespace
}  // namespace evmm::test
