// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/thread_ranks.hpp"

#include <evmm/address_range.hpp>
#include <evmm/comm/handle_exchange.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

// What an exchange of handles must do, written as one rank sees it: all ranks call each function.

namespace evmm::test {

/// Memory mapped to look into what was exchanged. On the host driver the CPU reaches it all.
class window {
 public:
  window(driver& on, const physical_memory& memory)
      : range_(on, memory.size()),
        mapped_(on, range_.base(), memory, std::array{access_grant{memory.location()}}) {}
  std::uint64_t& operator[](std::size_t i) const {
    return reinterpret_cast<std::uint64_t*>(range_.base())[i];
  }

 private:
  address_range range_;
  mapping mapped_;
};

/// `count` handles of this rank, of different sizes, on device and host in turn.
inline std::vector<physical_memory> some_memory(driver& on, std::size_t count, share_kind share) {
  std::vector<physical_memory> made;
  for (std::size_t i = 0; i < count; ++i) {
    const auto where =
        i % 2 == 0 ? memory_location::on(device_id{0}) : memory_location::on(numa_node{0});
    made.emplace_back(
        on, allocation_request{
                .bytes = on.granularity(where) * (1 + i % 3), .where = where, .share = share});
  }
  return made;
}

inline std::vector<const physical_memory*> pointers(const std::vector<physical_memory>& memory) {
  std::vector<const physical_memory*> all;
  for (const auto& one : memory) all.push_back(&one);
  return all;
}

/// Exchanges `count` handles a rank, or another number on each rank, and checks that every byte
/// that one rank writes is the one that another reads, in both directions.
inline void check_exchange(bootstrap& ranks, driver& on, handle_exchange& exchange,
                           std::size_t count, bool uneven = false) {
  const auto counted = [&](int rank) {
    return uneven ? count * static_cast<std::size_t>(rank) : count;
  };
  const auto mark = [](int writer, int owner, std::size_t i) {
    return (std::uint64_t(writer + 1) << 40) | (std::uint64_t(owner + 1) << 20) | i;
  };
  const int rank = ranks.rank().value;
  const auto mine = some_memory(on, counted(rank), exchange.transport());
  std::vector<window> own;
  for (std::size_t i = 0; i < mine.size(); ++i) {
    own.emplace_back(on, mine[i])[static_cast<std::size_t>(rank)] = mark(rank, rank, i);
  }
  const auto imported = exchange.exchange(pointers(mine));
  ranks.agree(nullptr, "exchanged");
  const auto& node = ranks.node_ranks();
  ASSERT_EQ(imported.size(), node.size());
  for (std::size_t n = 0; n < node.size(); ++n) {
    const int owner = node[n].value;
    ASSERT_EQ(imported[n].size(), owner == rank ? 0 : counted(owner));
    for (std::size_t i = 0; i < imported[n].size(); ++i) {
      EXPECT_FALSE(imported[n][i].owned());
      const auto where = i % 2 == 0 ? tier::device : tier::host;
      EXPECT_EQ(imported[n][i].location().kind, where);
      window theirs(on, imported[n][i]);
      EXPECT_EQ(theirs[static_cast<std::size_t>(owner)], mark(owner, owner, i));
      theirs[static_cast<std::size_t>(rank)] = mark(rank, owner, i);
    }
  }
  ranks.barrier("written");
  for (std::size_t i = 0; i < own.size(); ++i) {
    for (const auto& peer : node) {
      EXPECT_EQ(own[i][static_cast<std::size_t>(peer.value)], mark(peer.value, rank, i));
    }
  }
  ranks.barrier("read");
}

/// The last rank of each node has memory that cannot be shared: all of the node throw, and the next
/// exchange works.
inline void check_refusal(bootstrap& ranks, driver& on, handle_exchange& exchange) {
  if (ranks.node_ranks().size() == 1) return check_exchange(ranks, on, exchange, 1);
  const int last = ranks.node_ranks().back().value;
  const bool fails = ranks.rank().value == last;
  const auto mine = some_memory(on, 3, fails ? share_kind::none : exchange.transport());
  const auto text = thrown_by([&] { exchange.exchange(pointers(mine)); });
  EXPECT_THAT(text, fails ? testing::StartsWith("invalid_argument: memory of DEVICE 0 cannot be "
                                                "exchanged: it was created without sharing")
                          : testing::StartsWith("peer_error: rank " + std::to_string(last) +
                                                " could not share its memory: memory of"));
  EXPECT_THAT(text, testing::HasSubstr("; help: create it with the share_kind that transport()"));
  check_exchange(ranks, on, exchange, 1);
}

}  // namespace evmm::test
