// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>
#include <evmm/device/symmetric_view.cuh>
#include <evmm/driver.hpp>
#include <evmm/region.hpp>
#include <evmm/topology.hpp>

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// What a symmetric_region is made from; only `reserve` has no default.
struct symmetric_options {
  /// This rank's device. Ranks may share one.
  device_id device{0};
  /// Addresses for each rank, equal on all ranks; rounded up to the granularity. A rank reserves
  /// this once for each rank of its node.
  std::size_t reserve = 0;
  /// As in region_options; equal on all ranks.
  std::size_t max_segments = 32;
  /// As in region_options; equal on all ranks.
  std::size_t max_segment_bytes = std::size_t{8} << 30;
  /// Freed handles of this rank kept for reuse, in bytes.
  std::size_t cache_limit = std::size_t{1} << 30;
  /// Node or nodes of this rank's host tier.
  host_placement host = {};
  /// Whether the CPUs may touch host segments, this rank's and its peers'.
  bool cpu_access = true;
  /// Whether network cards may reach this rank's DEVICE segments (GPUDirect RDMA), as NCCL needs it
  /// between nodes.
  bool rdma = false;
  /// Try for the same base address on all ranks of the job. Best effort: see same_address().
  bool same_address = false;
};

/// This rank's part of a region, as collective observers see it.
struct region_part {
  std::byte* base = nullptr;
  std::vector<segment> segments = {};
};

/// Follows a region's changes on all ranks together: what can only be made by all of them, such as
/// an NCCL window. All ranks add the same observers in the same order, and drop them between the
/// same changes; a change that finds other observers on another rank is an invalid_argument.
///
/// A change asks, waits for the streams in its `uses`, takes down, replaces memory, commits or
/// rolls back, and brings up.
struct collective_observer {
  /// Local: whether a change lets go of what follows the region, at any step; who uses that is then
  /// waited for by whoever makes the change. Left out: every change does.
  std::function<bool(const region_change&)> concerns = {};
  /// Local. May throw to forbid the change on all ranks, before anything was done.
  std::function<void(const region_change&)> before_change = {};
  /// Local: lets go of the memory that the change replaces, before any rank does so. When it throws
  /// on any rank, the change is off and all ranks bring up.
  std::function<void(const region_change&)> take_down = {};
  /// Collective: every rank is here, the change holds or is off (see `committed`) and memory is in
  /// place. It cannot undo the change: what it throws is logged, and it remembers by itself. Where
  /// the ranks have lost each other it is called as well, and finds out.
  std::function<void(const region_change&, const region_part&)> bring_up = {};
  /// Local: the region is being closed or destroyed, its memory still in place.
  std::function<void()> gone = {};
};

/// Time this rank spent in each step of a change, waiting for the other ranks included.
struct change_times {
  std::chrono::nanoseconds propose{}, prepare{}, quiesce{}, take_down{}, copy{}, map{}, bring_up{};
};

/// A region of the same size and the same segments on every rank, each rank's part mapped by every
/// rank of its node: peer(r) + offset is the same object everywhere.
///
/// Addresses: stable from construction to close(). peer(r) is local() + (node rank of r - own) x
///   stride.
/// Units: bytes, multiples of the granularity.
/// Threads: one thread at a time, and the calls marked collective by all ranks in the same order.
/// Streams: changes that take memory away first wait for the streams in `uses`, each rank for its
///   own; name every stream that touches the affected bytes of any rank's part. The default stream
///   is that of this rank's device.
/// Errors: a collective change happens on all ranks, or on none: then every rank throws the same
///   error, which names the rank that failed, and every rank's region is as it was. A rank that
///   dies makes the others throw within the bootstrap's timeout; their region is then closed to
///   further changes (peer_error), its memory intact until close().
class symmetric_region {
 public:
  /// Collective over all ranks of the bootstrap. Throws invalid_argument when `reserve` or
  /// `max_segments` differ between ranks.
  symmetric_region(std::shared_ptr<bootstrap> ranks, std::shared_ptr<driver> on,
                   const symmetric_options& options);
  symmetric_region(symmetric_region&&) noexcept;
  symmetric_region& operator=(symmetric_region&&) noexcept;
  /// Local: unmaps and releases without telling anybody. Peers that still map this rank's memory
  /// keep it alive.
  ~symmetric_region();

  /// Collective: waits for `in_use` everywhere, then unmaps everything and releases it. Every
  /// other member is an invalid_argument afterwards; a second close does nothing.
  void close(const uses& in_use = {});

  // --- local queries --------------------------------------------------------------------------

  rank_id rank() const noexcept;
  int rank_count() const noexcept;
  /// This rank's device.
  device_id device() const noexcept;
  std::byte* local() const;
  /// Base of a node peer's part. Throws unsupported for a rank of another node.
  std::byte* peer(rank_id rank) const;
  bool reachable(rank_id rank) const;
  /// Backed bytes of each rank; 0 after close().
  std::size_t size() const noexcept;
  std::size_t reserved() const noexcept;
  std::size_t granularity() const noexcept;
  std::size_t max_segments() const noexcept;
  std::uint64_t epoch() const noexcept;
  /// What grow(_, bytes) would append now, after rounding. Throws as grow() does for its argument.
  std::size_t planned_growth(std::size_t bytes) const;
  /// Segments of any rank of the node.
  std::vector<segment> segments(rank_id rank) const;
  /// Whether all ranks of the job have this region's first part at the same address.
  bool same_address() const noexcept;
  region_statistics statistics() const;
  std::optional<placement_choice> placement() const;
  /// What kernels take; valid until the next change (compare its epoch).
  symmetric_view view() const;
  bootstrap& ranks() const noexcept;
  driver& on() const noexcept;

  // --- collective changes ---------------------------------------------------------------------

  /// Appends segments of the same size on all ranks, in the tier that each rank names.
  /// `bytes` is equal on all ranks; rounding as elastic_region::grow. No memory is taken away, but
  /// observers may take down what is to grow with it, such as a window over the whole region: name
  /// the streams that use that.
  grown grow(tier kind, std::size_t bytes, const uses& in_use = {});
  /// As elastic_region::shrink; `bytes` equal on all ranks.
  std::size_t shrink(std::size_t bytes, const uses& in_use = {});
  /// Moves segment `index` (equal on all ranks) to the tier that each rank names.
  void migrate(std::size_t index, tier kind, const uses& in_use = {});
  /// As elastic_region::discard; range and `kept` equal on all ranks.
  void discard(contents kept, const uses& in_use = {}, std::size_t first = 0,
               std::size_t count = static_cast<std::size_t>(-1));
  void restore();
  /// Puts one handle behind each run of neighbouring segments that lie in the same tier, for every
  /// rank: time to map, to share and to register grows with the number of handles. Contents and
  /// addresses are kept. Needs the memory of what is merged once more while it copies. Segments
  /// [first, first + count), by default all; equal on all ranks. Returns how many are left.
  std::size_t compact(const uses& in_use = {}, std::size_t first = 0,
                      std::size_t count = static_cast<std::size_t>(-1));

  /// Local. Observers see each change once a rank; before_change may veto it for all ranks.
  [[nodiscard]] observer_subscription observe(region_observer observer);
  /// Follows the region together with the other ranks, which all make this call. It does not block.
  [[nodiscard]] observer_subscription follow(collective_observer observer);
  /// Local: whether anything that follows the region lets go of what it has in such a change, of
  /// which kind, offset and bytes count. Then the streams that use that belong into its `uses`.
  bool takes_down(const region_change& change) const;
  /// Of the latest change, whether it held or not.
  change_times last_change() const noexcept;
  /// Local: releases cached handles.
  std::size_t trim_cache();

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm
