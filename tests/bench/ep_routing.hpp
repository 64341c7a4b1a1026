// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "examples/01_moe_exchange/routing.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace evmm::bench {

/// Which rank has which experts; every rank has as many.
enum class placement {
  in_order,     ///< rank 0 the first, rank 1 the next: what a model's numbering gives
  round_robin,  ///< expert e at rank e % ranks
  balanced,     ///< by how often each is chosen: the busiest first, each to the idlest rank
};
const char* to_string(placement of_experts);

/// Where the tokens of all ranks go. Every rank makes the same, and so knows what it must receive.
class ep_routing {
 public:
  /// Rank r sends the `tokens` lines from r x tokens, starting again at the routing's end. Experts
  /// are renumbered by their placement, and rounded up to a multiple of `ranks`: some have nobody.
  ep_routing(const moe::routing& chosen, int ranks, std::size_t tokens, placement where);

  int ranks() const { return ranks_; }
  int experts() const { return experts_; }
  int local_experts() const { return experts_ / ranks_; }
  int top_k() const { return top_k_; }
  /// Of each rank.
  std::size_t tokens() const { return tokens_; }
  /// [tokens][top_k].
  std::span<const std::int64_t> ids(int rank) const { return part(ids_, rank); }
  std::span<const float> weights(int rank) const { return part(weights_, rank); }
  /// [tokens]: a bit for each rank that has an expert of the token.
  std::span<const std::uint64_t> masks(int rank) const;
  bool goes(int source, std::size_t token, int to) const {
    return (masks(source)[token] >> to & 1) != 0;
  }

  /// Rows from one rank to another.
  std::size_t rows(int from, int to) const;
  std::size_t sent(int rank) const;  ///< to itself, too
  std::size_t received(int rank) const;
  std::size_t received_at_most() const;  ///< by the busiest rank
  std::size_t received_in_all() const;

  /// Where rows begin when a rank sends them in order of their receivers, then of their tokens, and
  /// receives them in order of their sources.
  std::size_t sent_before(int rank, int to) const;
  std::size_t received_before(int rank, int from) const;
  /// In that order: whose row it is, [sent(rank)].
  std::vector<std::int32_t> send_tokens(int rank) const;
  /// And where a token's rows are in it: [tokens][ranks], -1 for none.
  std::vector<std::int32_t> send_slots(int rank) const;

  /// With so many rows of DEVICE memory on each rank, how many rows of all ranks lie beyond.
  std::size_t spilled(std::size_t device_rows) const;
  /// The fewest rows of DEVICE memory with which at most `share` of all rows lie beyond.
  std::size_t device_rows_for(double share) const;

 private:
  template <class T>
  std::span<const T> part(const std::vector<T>& all, int rank) const {
    const std::size_t each = tokens_ * static_cast<std::size_t>(top_k_);
    return std::span<const T>(all).subspan(static_cast<std::size_t>(rank) * each, each);
  }

  int ranks_, experts_, top_k_;
  std::size_t tokens_;
  std::vector<std::int64_t> ids_;     ///< [ranks][tokens][top_k]
  std::vector<float> weights_;        ///< the same
  std::vector<std::uint64_t> masks_;  ///< [ranks][tokens]
  std::vector<std::size_t> rows_;     ///< [from][to]
};

/// Recorded routings: the file EVMM_ROUTING, or the *.csv.gz files of that folder; unset, of the
/// first shared/routing in the repository or a folder above it. Empty where there are none. Throws
/// invalid_argument when EVMM_ROUTING names nothing.
std::vector<std::string> recorded_routings();

}  // namespace evmm::bench
