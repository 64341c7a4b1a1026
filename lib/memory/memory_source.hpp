// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/topology.hpp>

#include <cstddef>
#include <cstdint>
#include <list>
#include <memory>
#include <optional>
#include <utility>

namespace [[gnu::visibility("default")]] evmm {

/// Physical memory that a region's slot, a roll-back and a peer's import may hold together.
using memory_ptr = std::shared_ptr<physical_memory>;

struct source_options {
  device_id device{0};
  host_placement host = {};
  share_kind share = share_kind::fd;
  bool rdma = false;
  std::size_t cache_limit = 0;
};

class memory_source;

/// Memory that was acquired for a change. Unless take() makes it final, the destructor undoes the
/// acquisition: what came from the cache returns there, what was created is released.
class memory_lease {
 public:
  memory_lease() = default;
  memory_lease(memory_source& source, memory_ptr memory, bool reused)
      : source_(&source), memory_(std::move(memory)), reused_(reused) {}
  memory_lease(memory_lease&& other) noexcept = default;
  memory_lease& operator=(memory_lease&& other) noexcept;
  ~memory_lease() { reset(); }

  const memory_ptr& get() const noexcept { return memory_; }
  memory_ptr take() noexcept { return std::exchange(memory_, nullptr); }

 private:
  void reset() noexcept;

  memory_source* source_ = nullptr;
  memory_ptr memory_;
  bool reused_ = false;
};

/// Where one rank's physical memory comes from and goes back to: chooses the NUMA node of the host
/// tier, checks capacity before it creates, and keeps freed handles for reuse.
///
/// Threads: one at a time. Streams: none. Errors: acquire throws and changes nothing but the cache.
class memory_source {
 public:
  memory_source(driver& on, const source_options& options);

  /// The location that the next acquire(kind, ...) will use. Chooses the host nodes at the first
  /// use of the host tier.
  memory_location location(tier kind);
  /// Memory of exactly `bytes`: a cached handle of that size and place, else a new one, for which
  /// cached handles of the same place are released if it must be.
  memory_lease acquire(tier kind, std::size_t bytes);
  /// Throws out_of_memory when it is known already that acquire would.
  void check_capacity(tier kind, std::size_t bytes);
  /// Keeps memory for reuse, or releases it when others hold it too or the limit says so.
  void recycle(memory_ptr memory) noexcept;
  /// Gives memory back, and counts it.
  void release(memory_ptr memory) noexcept;
  /// Releases all cached handles; the bytes given back.
  std::size_t trim() noexcept;

  const std::optional<placement_choice>& placement() const noexcept { return placement_; }
  std::size_t cached_bytes() const noexcept { return cached_bytes_; }
  std::size_t cached_device_bytes() const noexcept {
    return cached_at(memory_location::on(options_.device));
  }
  std::uint64_t created() const noexcept { return created_; }
  std::uint64_t reused() const noexcept { return reused_; }
  std::uint64_t released() const noexcept { return released_; }

 private:
  /// Releases cached handles at `where`, oldest first, until `enough` holds. Throws what that does.
  template <class Enough>
  void evict(memory_location where, Enough enough);
  std::size_t cached_at(memory_location where) const noexcept;

  driver& driver_;
  source_options options_;
  std::optional<placement_choice> placement_;
  std::size_t next_node_ = 0;
  std::list<memory_ptr> cache_;  ///< oldest first
  std::size_t cached_bytes_ = 0;
  std::uint64_t created_ = 0, reused_ = 0, released_ = 0;
};

}  // namespace evmm
