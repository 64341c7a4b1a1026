// SPDX-License-Identifier: Apache-2.0
// Kernels that follow NCCL's pointers into peers' memory find what evmm's own mappings hold.
#include "tests/gpu/nccl_job.hpp"
#include "tests/gpu/nccl_kernels.hpp"
#include "tests/support/patterns.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>

namespace evmm::test {
namespace {

class nccl_peers : public nccl_job {
 protected:
  void SetUp() override {
    nccl_job::SetUp();
    if (on != nullptr && stream != nullptr) {
      wrong = reinterpret_cast<unsigned long long*>(on->allocate_async(device, 8, stream));
    }
  }
  void TearDown() override {
    if (wrong != nullptr) on->free_async(reinterpret_cast<address>(wrong), stream);
    nccl_job::TearDown();
  }

  /// Every rank fills its part; then `compare_piece(rank, offset, bytes)` compares each peer's.
  void check(symmetric_region& region, const nccl_window& window, std::uint64_t seed,
             const std::function<void(rank_id, std::size_t, std::size_t)>& compare_piece) {
    ASSERT_EQ(window.why_down(), "");
    write_pattern(*on, reinterpret_cast<address>(region.local()), region.size(),
                  seed * 100 + static_cast<std::uint64_t>(rank().value), device);
    world()->barrier("test: filled");
    on->fill(reinterpret_cast<address>(wrong), std::byte{0}, 8, stream);
    for (const grown& piece : window.pieces()) {
      for (int r = 0; r < size(); ++r) compare_piece({r}, piece.offset, piece.bytes);
    }
    EXPECT_EQ(read<unsigned long long>(reinterpret_cast<std::byte*>(wrong), 1)[0], 0u);
    // That the mappings themselves are right: a peer's pattern is the peer's.
    const rank_id next{(rank().value + 1) % size()};
    EXPECT_TRUE(holds_pattern(*on, reinterpret_cast<address>(region.peer(next)), region.size(),
                              seed * 100 + static_cast<std::uint64_t>(next.value), device));
    world()->barrier("test: compared");
  }

  /// The same over growth, a host tail where NCCL has that, migration and compaction.
  void check_over_changes(const std::function<void(symmetric_region&, const nccl_window&, rank_id,
                                                   std::size_t, std::size_t)>& compare_piece) {
    auto region = make_region(1_GiB);
    region.grow(tier::device, 32_MiB);
    auto comm = make_communicator();
    {
      const nccl_window window(comm, region, {.kernels_only = true});
      std::uint64_t seed = 0;
      const auto again = [&] {
        check(region, window, ++seed, [&](rank_id peer, std::size_t offset, std::size_t bytes) {
          compare_piece(region, window, peer, offset, bytes);
        });
      };
      again();
      region.grow(tier::device, 64_MiB, own_stream());
      again();
      if (comm.why_not(nccl_ability::host_segments).empty()) {
        region.grow(tier::host, 32_MiB, own_stream());
        again();
        region.migrate(0, rank() == rank_id{0} ? tier::host : tier::device, own_stream());
        again();
        region.migrate(0, tier::device, own_stream());
      }
      region.compact(own_stream());
      again();
    }
    comm.close();
    region.close();
  }

  unsigned long long* wrong = nullptr;
};

std::uint64_t* words_at(std::byte* at) {
  return reinterpret_cast<std::uint64_t*>(at);
}

TEST_F(nccl_peers, addresses_from_the_host_lead_to_peers_memory) {
  int version = 0;
  load_nccl().api.get_version(&version);
  if (version < nccl_version_with(nccl_ability::peer_pointers)) {
    GTEST_SKIP() << "NCCL " << version << " tells no peers' addresses to the host";
  }
  check_over_changes([&](symmetric_region& region, const nccl_window& window, rank_id peer,
                         std::size_t offset, std::size_t bytes) {
    compare(words_at(region.peer(peer) + offset), words_at(window.peer(peer, offset)), bytes / 8,
            wrong, stream);
  });
}

TEST_F(nccl_peers, lsa_pointers_on_the_device_lead_to_peers_memory) {
  int version = 0;
  load_nccl().api.get_version(&version);
  if (!reads_windows_of(version)) {
    GTEST_SKIP() << "kernels built with NCCL " << compiled_nccl_version()
                 << " cannot read windows of NCCL " << version << "; configure with NCCL_ROOT";
  }
  check_over_changes([&](symmetric_region& region, const nccl_window& window, rank_id peer,
                         std::size_t offset, std::size_t bytes) {
    const nccl_place place = window.at(offset);
    compare_with_lsa(words_at(region.peer(peer) + offset), place.window, place.offset, peer.value,
                     bytes / 8, wrong, stream);
  });
}

TEST_F(nccl_peers, stores_through_lsa_pointers_arrive_in_host_memory_too) {
  int version = 0;
  load_nccl().api.get_version(&version);
  if (version < nccl_version_with(nccl_ability::host_segments)) {
    GTEST_SKIP() << "host segments need NCCL " << nccl_version_with(nccl_ability::host_segments)
                 << ", this is " << version;
  }
  if (!reads_windows_of(version)) {
    GTEST_SKIP() << "kernels built with NCCL " << compiled_nccl_version()
                 << " cannot read windows of NCCL " << version << "; configure with NCCL_ROOT";
  }
  auto region = make_region(1_GiB);
  region.grow(tier::device, 2_MiB);
  region.grow(tier::host, 32_MiB);
  auto comm = make_communicator();
  {
    const nccl_window window(comm, region, {.kernels_only = true});
    const rank_id next{(rank().value + 1) % size()};
    const rank_id previous{(rank().value + size() - 1) % size()};
    const nccl_place place = window.at(1_MiB);  // across the tiers' boundary
    const auto first_of = [](rank_id of) { return static_cast<std::uint64_t>(of.value) << 32; };
    count_into_lsa(place.window, place.offset, next.value, 16_MiB / 8, first_of(rank()), stream);
    on->synchronize(stream);
    world()->barrier("test: stored");
    std::vector<std::uint64_t> expected(16_MiB / 8);
    for (std::size_t i = 0; i < expected.size(); ++i) expected[i] = first_of(previous) + i;
    EXPECT_EQ(read<std::uint64_t>(region.local() + 1_MiB, expected.size()), expected);
    world()->barrier("test: read");
  }
  comm.close();
  region.close();
}

}  // namespace
}  // namespace evmm::test
