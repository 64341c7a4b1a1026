// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/collective_change.hpp"
#include "comm/collective_observers.hpp"
#include "lib/memory/copier.hpp"
#include "lib/memory/memory_source.hpp"
#include "lib/memory/observers.hpp"
#include "lib/memory/part.hpp"

#include <evmm/address_range.hpp>
#include <evmm/comm/handle_exchange.hpp>
#include <evmm/comm/symmetric_region.hpp>

#include <memory>
#include <optional>
#include <vector>

namespace evmm {

/// What the ranks must agree on before a change, and what each wants of it.
struct proposal;

struct symmetric_region::state {
  state(std::shared_ptr<bootstrap> ranks_given, std::shared_ptr<driver> driver_given,
        const symmetric_options& options);
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state();

  grown grow(tier kind, std::size_t bytes, const uses& in_use);
  std::size_t shrink(std::size_t bytes, const uses& in_use);
  void migrate(std::size_t index, tier kind, const uses& in_use);
  void discard(contents kept, const uses& in_use, std::size_t first, std::size_t count);
  void restore();
  std::size_t compact(const uses& in_use, std::size_t first, std::size_t count);
  void close(const uses& in_use);

  /// Throws invalid_argument after close().
  void check_open() const;
  part& own() noexcept { return parts[static_cast<std::size_t>(ranks->node_rank())]; }
  /// Index in `parts`; nullopt for a rank of another node.
  std::optional<std::size_t> node_rank_of(rank_id rank) const;
  /// Throws unsupported for a rank of another node, invalid_argument for one that does not exist.
  const part& part_of(rank_id rank) const;

  /// Every rank's proposal, all equal but for the tier; else every rank throws the same
  /// invalid_argument. Collective.
  std::vector<proposal> propose(proposal mine);
  /// Completes `change` with what all kinds share, and runs it.
  void run_change(collective_change change, std::uint64_t& counter);
  /// Indices of the discarded segments among [first, last), or of those that are not.
  std::vector<std::size_t> select(index_range within, bool discarded);
  /// Maximal runs of more than one segment within a range that lie in one tier, on every rank of
  /// the job. Discarded ones are in none.
  std::vector<index_range> runs_of_one_tier(index_range within,
                                            const std::vector<proposal>& proposed);
  region_part own_part();
  /// The bytes from the first to the last of these segments.
  region_change span_of(change_kind kind, const std::vector<std::size_t>& indices);
  void reserve_addresses(bool same_wanted);

  // In order of construction; destroyed in reverse, mappings before the range, all before `on`.
  std::shared_ptr<bootstrap> ranks;
  std::shared_ptr<driver> on;
  segment_limits limits;
  std::uint64_t number = 0;  ///< of this region, the same on all ranks
  device_id device;
  access_rule access;
  std::optional<memory_source> source;
  std::optional<handle_exchange> exchange;
  std::optional<address_range> range;
  std::optional<copier> copies;
  observer_list observers;
  collective_observer_list followers;
  std::vector<part> parts;  ///< by node rank
  bool same_address = false;
  bool closed = false;
  std::uint64_t epoch = 0;
  change_times times;
  region_statistics counts;  ///< only what cannot be computed when asked for
};

}  // namespace evmm
