// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/region.hpp>
#include <evmm/topology.hpp>

#include <cstddef>
#include <memory>
#include <optional>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// What an elastic_region is made from; only `reserve` has no default.
struct region_options {
  device_id device{0};
  /// Addresses to reserve; rounded up to the granularity. Costs no memory.
  std::size_t reserve = 0;
  /// Most segments the region will ever have, 1 to 64: mapping and registering cost time by the
  /// handle. Growth is exact until the slots left could only just reach the reservation by steps
  /// of half the size; from then on grow() takes such steps.
  std::size_t max_segments = 32;
  /// Larger growth is cut into segments of this size as long as half of the slots stay free: making
  /// one handle of 64 GiB of recycled memory took 312 ms, eight of 8 GiB 109 ms (H200).
  std::size_t max_segment_bytes = std::size_t{8} << 30;
  /// Freed handles kept for reuse, in bytes: host pages cost 250 ms a GiB to make.
  std::size_t cache_limit = std::size_t{1} << 30;
  /// Node or nodes of the host tier.
  host_placement host = {};
  /// Further devices that may touch the region. Each costs about 20 ms a GiB when it grows.
  std::vector<device_id> peers = {};
  /// Whether the CPUs may touch the host tier.
  bool cpu_access = true;
  /// How handles can leave the process.
  share_kind share = share_kind::fd;
  /// Whether network cards may reach the DEVICE segments (GPUDirect RDMA).
  bool rdma = false;
};

/// A change whose streams were not past it yet; see elastic_region::shrink_later.
class pending_change {
 public:
  /// An empty one is complete.
  pending_change() = default;
  /// Whether poll() or finish() of the region has completed it.
  bool complete() const noexcept { return !open_ || !*open_; }

 private:
  friend class elastic_region;
  std::shared_ptr<const bool> open_;
};

/// A range of addresses that stays where it is while the memory behind it grows, shrinks and moves
/// between DEVICE and HOST_NUMA.
///
/// Addresses: data() and every offset are stable from construction to destruction. Bytes at
///   offsets below size() that are not in a discarded segment are backed.
/// Units: bytes; sizes are rounded up to the granularity (2 MiB on current GPUs).
/// Threads: one thread at a time may change it; const members may run beside each other, not
///   beside a change.
/// Streams: grow() waits for no stream. shrink, migrate and discard wait for what `uses` names and
///   for their own copies; work on other parts of the region goes on meanwhile.
/// Errors: every change either happens or leaves the region as it was. out_of_memory comes before
///   anything is created when a tier is known to be too small; it says which tier, how much was
///   asked, free and held, and which option would help.
class elastic_region {
 public:
  /// Reserves the addresses. Throws invalid_argument for options that cannot be.
  elastic_region(std::shared_ptr<driver> on, const region_options& options);
  /// Waits for pending changes, unmaps and releases. The caller has made sure that nothing uses it.
  ~elastic_region();

  elastic_region(elastic_region&&) noexcept;
  elastic_region& operator=(elastic_region&&) noexcept;

  std::byte* data() const noexcept;
  /// Bytes from data() that belong to segments, discarded ones included.
  std::size_t size() const noexcept;
  std::size_t reserved() const noexcept;
  std::size_t granularity() const noexcept;
  /// Number of committed changes.
  std::uint64_t epoch() const noexcept;
  std::vector<segment> segments() const;
  region_statistics statistics() const;
  /// How the node or nodes of the host tier were chosen; empty until the host tier is first used.
  std::optional<placement_choice> placement() const;
  driver& on() const noexcept;

  /// Appends at least `bytes`, as one handle unless that is too large (max_segment_bytes), and
  /// returns what was added. Rounded up to the granularity, and to a larger step when few segment
  /// slots are left (max_segments). Contents are undefined.
  /// Throws invalid_argument for 0 bytes or beyond the reservation, out_of_memory.
  grown grow(tier kind, std::size_t bytes);

  /// Drops whole segments from the tail, as many as fit into `bytes`, and returns the bytes
  /// dropped (which may be 0). Waits for `in_use` first; handles go to the cache.
  std::size_t shrink(std::size_t bytes, const uses& in_use = {});

  /// Moves segment `index` to the other tier: contents and address are kept.
  /// Waits for `in_use`, copies, and swaps. The caller writes to it only before the call, on
  /// streams that `in_use` names, or after. A segment already in that tier is left
  /// alone.
  void migrate(std::size_t index, tier kind, const uses& in_use = {});

  /// As shrink(), without blocking: the segments leave size() at once, and are unmapped by the
  /// first poll(), finish() or grow() after the streams are past them.
  pending_change shrink_later(std::size_t bytes, const uses& in_use = {});
  /// As migrate(), without blocking: the copy is enqueued behind `in_use`, and the swap is made by
  /// the first poll() or finish() after the copy. Until then the old memory serves reads; writes
  /// made meanwhile are lost.
  pending_change migrate_later(std::size_t index, tier kind, const uses& in_use = {});
  /// Completes the pending changes whose streams are past them, oldest first, never blocking on a
  /// stream. Returns how many are left.
  std::size_t poll();
  /// Completes all pending changes, blocking on their streams.
  void finish();

  /// Gives the memory of segments [first, first + count) back to the driver, not to the cache, and
  /// keeps their addresses: a sleep mode. By default all. Already discarded ones are left alone.
  void discard(contents kept, const uses& in_use = {}, std::size_t first = 0,
               std::size_t count = static_cast<std::size_t>(-1));
  /// Takes memory again for every discarded segment, in the tier it had, and copies backups back.
  /// All or none.
  void restore();

  /// Releases the cached handles; returns the bytes given back.
  std::size_t trim_cache();

  [[nodiscard]] observer_subscription observe(region_observer observer);

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm
