// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/patterns.hpp"
#include "tests/support/symmetric_cases.hpp"

#include <evmm/comm/symmetric_heap.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>

// What the cases of symmetric_heap look at.

namespace evmm::test {

inline address address_of(const std::byte* at) {
  return reinterpret_cast<address>(at);
}

inline std::uint64_t seed_of(std::size_t offset, rank_id rank) {
  return offset * 64 + static_cast<std::uint64_t>(rank.value);
}

/// Writes a block's pattern on this rank.
inline void write(const rank_context& at, const symmetric_heap& heap, std::size_t offset,
                  std::size_t bytes) {
  write_pattern(*at.on, address_of(heap.local(offset)), bytes, seed_of(offset, at.ranks->rank()),
                at.device);
}

/// Every rank finds every node peer's pattern.
inline void expect_seen_by_all(const rank_context& at, const symmetric_heap& heap,
                               std::size_t offset, std::size_t bytes) {
  at.ranks->barrier("test: written");
  for (const rank_id peer : at.ranks->node_ranks()) {
    EXPECT_TRUE(holds_pattern(*at.on, address_of(heap.peer(peer, offset)), bytes,
                              seed_of(offset, peer), at.device))
        << "rank " << peer.value << " at offset " << offset;
  }
  at.ranks->barrier("test: read");
}

inline tier tier_at(const symmetric_heap& heap, std::size_t offset) {
  for (const segment& held : heap.region().segments(heap.region().rank())) {
    if (offset >= held.offset && offset < held.offset + held.bytes) return held.where.kind;
  }
  ADD_FAILURE() << "nothing is backed at " << offset;
  return tier::device;
}

}  // namespace evmm::test
