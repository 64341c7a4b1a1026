// SPDX-License-Identifier: Apache-2.0
#pragma once

// Who holds which expert, who works on which tokens, and where each row goes. All of it is
// arithmetic that every rank does alike, so nothing here communicates.
//
// A row is one (token, expert) pair. The rows that a rank receives lie packed from the start of its
// receive area, expert by expert, and within an expert source by source: a grouped matrix
// multiplication finds each expert's rows side by side, and whatever is too much for the DEVICE
// segments at the front lands in the HOST_NUMA tail by itself.

#include <evmm/region.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moe {

/// Experts spread over ranks in order, as evenly as they can be.
struct expert_placement {
  int experts = 0;
  int ranks = 1;

  int first(int rank) const;
  int count(int rank) const { return first(rank + 1) - first(rank); }
  int most() const;  ///< experts of the fullest rank
  int rank_of(int expert) const;
};

/// Consecutive tokens. Positions run on past the end of the routing, which then starts again.
struct token_slice {
  std::uint64_t first = 0;
  std::size_t count = 0;
};

/// Which tokens belong to which rank in which step.
struct work_split {
  std::size_t trace_tokens = 0;
  int ranks = 1;
  int steps = 1;
  /// Tokens of a rank in a step; 0 deals each token of the routing out once, evenly.
  std::size_t tokens_each = 0;

  token_slice of(int step) const;
  token_slice of(int step, int rank) const;
  std::size_t most_in_step() const;
  std::size_t most_in_rank() const;
};

/// Where a row is stored: row index within a rank's receive area.
struct row_target {
  std::int32_t rank = 0;
  std::uint32_t row = 0;
  friend bool operator==(const row_target&, const row_target&) = default;
};

/// One step's exchange, from the matrix of counts.
class exchange_plan {
 public:
  /// `counts` is ranks x experts: rows that each rank has for each expert.
  exchange_plan(const expert_placement& placement, std::vector<std::uint32_t> counts);

  const expert_placement& placement() const { return placement_; }
  std::uint32_t count(int source, int expert) const { return counts_[index(source, expert)]; }
  /// Row, at the expert's rank, of the source's first row for the expert.
  std::uint32_t first_row(int source, int expert) const { return first_[index(source, expert)]; }
  /// Rows that a rank receives.
  std::uint32_t rows_at(int rank) const { return rows_[static_cast<std::size_t>(rank)]; }
  std::uint32_t most_rows() const;
  std::uint64_t total_rows() const;
  /// First row of each of a rank's experts, and the end: one more than it has experts.
  std::vector<std::uint32_t> expert_starts(int rank) const;
  /// The target of each (token, choice) of a source, whose expert ids these are, token by token.
  std::vector<row_target> targets(int source, std::span<const std::int32_t> ids) const;

 private:
  std::size_t index(int source, int expert) const {
    return static_cast<std::size_t>(source) * static_cast<std::size_t>(placement_.experts) +
           static_cast<std::size_t>(expert);
  }

  expert_placement placement_;
  std::vector<std::uint32_t> counts_;
  std::vector<std::uint32_t> first_;
  std::vector<std::uint32_t> rows_;
};

/// Rows for each expert among a rank's (token, choice) pairs.
std::vector<std::uint32_t> count_rows(std::span<const std::int32_t> ids, int experts);

/// Bytes by the kind of memory that they lie in.
struct tier_bytes {
  std::uint64_t device = 0;
  std::uint64_t host = 0;
  std::uint64_t total() const { return device + host; }
  tier_bytes& operator+=(const tier_bytes& more) {
    device += more.device;
    host += more.host;
    return *this;
  }
};

/// How much of [begin, end) of a region lies where.
tier_bytes split_by_tier(std::span<const evmm::segment> segments, std::uint64_t begin,
                         std::uint64_t end);

/// Bytes of rows from each rank (row) to each rank (column), by the memory at the destination.
class traffic_matrix {
 public:
  explicit traffic_matrix(int ranks)
      : ranks_(ranks), cells_(static_cast<std::size_t>(ranks) * static_cast<std::size_t>(ranks)) {}

  int ranks() const { return ranks_; }
  tier_bytes& at(int source, int target) { return cells_[index(source, target)]; }
  const tier_bytes& at(int source, int target) const { return cells_[index(source, target)]; }
  tier_bytes into(int target) const;
  tier_bytes total() const;
  tier_bytes own() const;  ///< the diagonal: what does not leave its rank
  traffic_matrix& operator+=(const traffic_matrix& more);

 private:
  std::size_t index(int source, int target) const {
    return static_cast<std::size_t>(source) * static_cast<std::size_t>(ranks_) +
           static_cast<std::size_t>(target);
  }
  int ranks_;
  std::vector<tier_bytes> cells_;
};

/// The step's traffic, when `segments` (by rank) back a receive area that starts at `rows_offset`.
traffic_matrix count_traffic(const exchange_plan& plan,
                             std::span<const std::vector<evmm::segment>> segments,
                             std::uint64_t rows_offset, std::uint64_t row_bytes);

}  // namespace moe
