// SPDX-License-Identifier: Apache-2.0
#include "plan.hpp"

#include <algorithm>
#include <numeric>

namespace moe {

namespace {
/// Start of part `index` when `whole` is cut into `parts` of nearly equal size.
std::uint64_t cut(std::uint64_t whole, int index, int parts) {
  return whole * static_cast<std::uint64_t>(index) / static_cast<std::uint64_t>(parts);
}
}  // namespace

int expert_placement::first(int rank) const {
  return static_cast<int>(cut(static_cast<std::uint64_t>(experts), rank, ranks));
}

int expert_placement::most() const {
  return (experts + ranks - 1) / ranks;
}

int expert_placement::rank_of(int expert) const {
  // The inverse of first(): the last rank that starts at or before the expert.
  return ((expert + 1) * ranks - 1) / experts;
}

token_slice work_split::of(int step) const {
  if (tokens_each != 0) {
    const std::size_t count = tokens_each * static_cast<std::size_t>(ranks);
    return {static_cast<std::uint64_t>(step) * count, count};
  }
  const std::uint64_t first = cut(trace_tokens, step, steps);
  return {first, cut(trace_tokens, step + 1, steps) - first};
}

token_slice work_split::of(int step, int rank) const {
  const token_slice whole = of(step);
  const std::uint64_t first = cut(whole.count, rank, ranks);
  return {whole.first + first, cut(whole.count, rank + 1, ranks) - first};
}

std::size_t work_split::most_in_step() const {
  std::size_t most = 0;
  for (int step = 0; step < steps; ++step) most = std::max(most, of(step).count);
  return most;
}

std::size_t work_split::most_in_rank() const {
  const auto parts = static_cast<std::size_t>(ranks);
  return (most_in_step() + parts - 1) / parts;
}

exchange_plan::exchange_plan(const expert_placement& placement, std::vector<std::uint32_t> counts)
    : placement_(placement),
      counts_(std::move(counts)),
      first_(counts_.size()),
      rows_(static_cast<std::size_t>(placement.ranks)) {
  for (int rank = 0; rank < placement_.ranks; ++rank) {
    std::uint32_t next = 0;
    for (int e = placement_.first(rank); e < placement_.first(rank + 1); ++e) {
      for (int source = 0; source < placement_.ranks; ++source) {
        first_[index(source, e)] = next;
        next += counts_[index(source, e)];
      }
    }
    rows_[static_cast<std::size_t>(rank)] = next;
  }
}

std::uint32_t exchange_plan::most_rows() const {
  return *std::max_element(rows_.begin(), rows_.end());
}

std::uint64_t exchange_plan::total_rows() const {
  return std::accumulate(rows_.begin(), rows_.end(), std::uint64_t{0});
}

std::vector<std::uint32_t> exchange_plan::expert_starts(int rank) const {
  std::vector<std::uint32_t> starts;
  for (int e = placement_.first(rank); e < placement_.first(rank + 1); ++e) {
    starts.push_back(first_row(0, e));
  }
  starts.push_back(rows_at(rank));
  return starts;
}

std::vector<row_target> exchange_plan::targets(int source,
                                               std::span<const std::int32_t> ids) const {
  std::vector<std::uint32_t> next(static_cast<std::size_t>(placement_.experts));
  for (int e = 0; e < placement_.experts; ++e) {
    next[static_cast<std::size_t>(e)] = first_row(source, e);
  }
  std::vector<row_target> made;
  made.reserve(ids.size());
  for (const std::int32_t id : ids) {
    made.push_back({placement_.rank_of(id), next[static_cast<std::size_t>(id)]++});
  }
  return made;
}

std::vector<std::uint32_t> count_rows(std::span<const std::int32_t> ids, int experts) {
  std::vector<std::uint32_t> counts(static_cast<std::size_t>(experts));
  for (const std::int32_t id : ids) ++counts[static_cast<std::size_t>(id)];
  return counts;
}

tier_bytes split_by_tier(std::span<const evmm::segment> segments, std::uint64_t begin,
                         std::uint64_t end) {
  tier_bytes split;
  for (const auto& part : segments) {
    const std::uint64_t from = std::max<std::uint64_t>(begin, part.offset);
    const std::uint64_t to = std::min<std::uint64_t>(end, part.offset + part.bytes);
    if (from >= to) continue;
    (part.where.kind == evmm::tier::device ? split.device : split.host) += to - from;
  }
  return split;
}

tier_bytes traffic_matrix::into(int target) const {
  tier_bytes sum;
  for (int source = 0; source < ranks_; ++source) sum += at(source, target);
  return sum;
}

tier_bytes traffic_matrix::total() const {
  tier_bytes sum;
  for (const auto& cell : cells_) sum += cell;
  return sum;
}

tier_bytes traffic_matrix::own() const {
  tier_bytes sum;
  for (int rank = 0; rank < ranks_; ++rank) sum += at(rank, rank);
  return sum;
}

traffic_matrix& traffic_matrix::operator+=(const traffic_matrix& more) {
  for (std::size_t i = 0; i < cells_.size(); ++i) cells_[i] += more.cells_[i];
  return *this;
}

traffic_matrix count_traffic(const exchange_plan& plan,
                             std::span<const std::vector<evmm::segment>> segments,
                             std::uint64_t rows_offset, std::uint64_t row_bytes) {
  const auto& placement = plan.placement();
  traffic_matrix traffic(placement.ranks);
  for (int e = 0; e < placement.experts; ++e) {
    const int target = placement.rank_of(e);
    for (int source = 0; source < placement.ranks; ++source) {
      const std::uint64_t begin = rows_offset + plan.first_row(source, e) * row_bytes;
      traffic.at(source, target) += split_by_tier(segments[static_cast<std::size_t>(target)], begin,
                                                  begin + plan.count(source, e) * row_bytes);
    }
  }
  return traffic;
}

}  // namespace moe
