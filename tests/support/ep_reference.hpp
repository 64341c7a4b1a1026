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
  std::vector<int> node_of;         ///< by rank, counted in the order of their first ranks
  std::vector<std::size_t> counts;  ///< tokens of each rank
  std::uint64_t seed = 0;
  std::uint64_t routing_seed = 0;  ///< of ids and weights; 0: as the rest
  /// Experts [0, hot) are chosen three times out of four; 0: all alike.
  int hot = 0;
  /// No token chooses an expert twice, where there are enough of them.
  bool distinct = false;
  /// One in so many choices is -1; 0: none.
  int masked = 0;
  bool tells_most = false;  ///< tokens::most is given
  /// In ascending order.
  std::vector<int> ranks_of(int node) const;
  std::uint64_t routing() const { return routing_seed == 0 ? seed : routing_seed; }
  bool scaled() const { return options.rows == ep::payload::fp8; }
  bool by_expert() const { return options.arranged == ep::layout::by_expert; }
  std::size_t row_bytes() const;
  std::size_t scale_count() const { return options.hidden / 128; }
  /// As they are given: bf16 to be quantised, or what rows() says.
  std::vector<std::byte> given(int rank) const;
  std::vector<std::byte> rows(int rank) const;
  std::vector<float> scales(int rank) const;
  /// bf16 [count][hidden]
  std::vector<std::uint16_t> gradients(int rank) const;
  std::vector<std::int64_t> ids(int rank) const;
  std::vector<float> weights(int rank) const;
  /// What a rank's experts make of its row, or one of a choice(): bf16.
  std::vector<std::uint16_t> made(int rank, std::size_t row) const;
  static std::size_t choice(std::size_t row, std::size_t k) { return 1'000'000 + row * 32 + k; }
};

/// A row that a rank receives.
struct ep_row {
  int source;
  std::size_t token;
  int via = 0;  ///< rank of the receiver's node that sent it on; the source, if it is there
  std::size_t index = 0;  ///< of what that rank sends
};

/// What all ranks send.
class ep_sent {
 public:
  explicit ep_sent(const ep_script& script);
  /// Whether the row at index `at` is this one.
  bool is_row(const ep_row& row, const std::vector<std::byte>& x, const std::vector<float>& scales,
              std::size_t at) const;

 private:
  std::size_t row_bytes_, scale_count_;
  std::vector<std::vector<std::byte>> rows_;
  std::vector<std::vector<float>> scales_;
};

/// Rows that `rank` receives, in order.
std::vector<ep_row> rows_received(const ep_script& script, int rank);
/// What combine gives `rank`: bf16 [count][hidden], with `bias` added when it is not empty. By
/// expert, weights are applied when `weighted`. Ranks whose bit is in `without` add nothing.
std::vector<std::uint16_t> combined(const ep_script& script, int rank,
                                    const std::vector<std::uint16_t>& bias, bool weighted = true,
                                    std::uint64_t without = 0);

}  // namespace evmm::test
