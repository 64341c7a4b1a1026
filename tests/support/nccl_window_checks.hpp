// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/patterns.hpp"

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/nccl_window.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace evmm::test {

using namespace evmm::units;

/// A region in one window, where the loaded NCCL can have it so.
const nccl_range k_whole{.kernels_only = true};

/// "0+4 8+2": where each piece starts and how long it is, in MiB.
inline std::string text_of(const std::vector<grown>& pieces) {
  std::string text;
  for (const grown& each : pieces) {
    if (!text.empty()) text += ' ';
    text += std::to_string(each.offset >> 20) + '+' + std::to_string(each.bytes >> 20);
  }
  return text;
}

/// Every rank writes into its own part, and finds what its peers wrote through NCCL's mappings, in
/// every piece; where NCCL tells no peers' addresses, nothing is checked.
inline void expect_peers_seen(const nccl_communicator& on, const symmetric_region& region,
                              const nccl_window& window, std::uint64_t seed) {
  if (!on.why_not(nccl_ability::peer_pointers).empty()) return;
  constexpr std::size_t bytes = 4_KiB;
  const auto each_mark = [&](auto&& visit) {
    for (const grown& piece : window.pieces()) {
      for (std::size_t at = piece.offset; at < piece.offset + piece.bytes; at += 2_MiB) visit(at);
      visit(piece.offset + piece.bytes - bytes);
    }
  };
  const auto seed_of = [&](rank_id rank, std::size_t at) {
    return seed * 1000 + (at >> 12) * 10 + static_cast<std::uint64_t>(rank.value);
  };
  each_mark([&](std::size_t at) {
    write_pattern(region.on(), reinterpret_cast<address>(region.local()) + at, bytes,
                  seed_of(region.rank(), at), region.device());
  });
  region.ranks().barrier("test: written");
  each_mark([&](std::size_t at) {
    for (int r = 0; r < region.rank_count(); ++r) {
      EXPECT_TRUE(holds_pattern(region.on(), reinterpret_cast<address>(window.peer({r}, at)), bytes,
                                seed_of({r}, at), region.device()))
          << "rank " << r << " at " << at;
    }
  });
  region.ranks().barrier("test: read");
}

}  // namespace evmm::test
