// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/ep/exchange.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace evmm::test {

/// One exchange, as every rank can work it out alone: what each rank sends follows from the seed.
struct ep_script {
  ep::exchange_options options;
  int ranks = 1;
  std::vector<std::size_t> counts;  ///< tokens of each rank
  std::uint64_t seed = 0;
  /// Experts [0, hot) are chosen three times out of four; 0: all alike.
  int hot = 0;
  /// One in so many choices is -1; 0: none.
  int masked = 0;

  std::size_t row_bytes() const;
  std::size_t scale_count() const { return options.hidden / 128; }
  std::vector<std::byte> rows(int rank) const;
  std::vector<float> scales(int rank) const;
  std::vector<std::int64_t> ids(int rank) const;
  std::vector<float> weights(int rank) const;
  /// What a rank's experts make of its row: bf16.
  std::vector<std::uint16_t> made(int rank, std::size_t row) const;
};

/// A row that a rank receives.
struct ep_row {
  int source;
  std::size_t token;
};

/// Rows that `rank` receives, in order.
std::vector<ep_row> rows_received(const ep_script& script, int rank);
/// What combine gives `rank`: bf16 [count][hidden], with `bias` added when it is not empty.
std::vector<std::uint16_t> combined(const ep_script& script, int rank,
                                    const std::vector<std::uint16_t>& bias);

}  // namespace evmm::test
