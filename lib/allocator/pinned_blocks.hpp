// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

namespace evmm::pinned {

/// The unit of sizes in ordinary segments, and in the reserve segment.
inline constexpr std::size_t k_unit = 4096;
inline constexpr std::size_t k_small_unit = 512;

/// A piece of memory from the driver.
struct segment {
  address base = 0;
  std::size_t bytes = 0;
  bool registered = false;  ///< ordinary pages that were pinned, rather than allocated so
  bool reserve = false;     ///< the reserve segment
};

enum class block_use : std::uint8_t {
  free,
  live,
  leaving,  ///< free() is on its way: events are being recorded
  waiting,  ///< freed; streams may still use it
};

/// A stream that uses a block, and the device it is of.
using stream_use = std::pair<device_id, native_stream>;

/// A part of a segment.
struct block {
  using free_key = std::pair<std::size_t, address>;  ///< bytes first: best fit is a lower bound
  using free_set = std::set<free_key>;

  address at = 0;
  std::size_t bytes = 0;
  const segment* in = nullptr;
  block_use use = block_use::live;
  std::size_t requested = 0;
  std::vector<stream_use> streams = {};
  std::size_t marks = 0;          ///< events that must be reached before it is free
  free_set::node_type slot = {};  ///< its entry among the free, kept while it is not: freeing must
                                  ///< not need memory
  bool whole() const { return bytes == in->bytes; }
};

/// The blocks of all segments: best fit, split, merge. Bookkeeping only, not thread-safe. A call
/// that throws (bad_alloc alone) has changed nothing.
class block_table {
 public:
  /// A segment that was taken out, to be given back, or put back without needing memory.
  struct taken {
    std::map<address, segment>::node_type piece;
    std::map<address, block>::node_type whole;
    const segment& what() const { return piece.mapped(); }
  };

  /// The smallest free block that serves `bytes`, made live, its rest free; null when there is
  /// none. Unless `any`, blocks that are far larger do not serve.
  block* take(std::size_t bytes, bool any);
  /// The same out of the reserve segment.
  block* take_reserved(std::size_t bytes);
  /// A new segment; all of it is one live block.
  block* add(const segment& piece);
  /// Makes a block free and joins it with free neighbours. Returns what it became.
  block& give(block& freed) noexcept;
  /// Makes the block, live or free, one of `bytes`, which is less than it has; the rest is free. A
  /// block that was free is in no set then, so that it can be made live.
  void cut(block& live, std::size_t bytes);

  /// The block that holds `at`; null when none does.
  block* find(address at) noexcept;
  const block* find(address at) const noexcept;

  /// Takes out the first segment from `from` on that is free as a whole, larger than `above` and
  /// not the reserve segment.
  std::optional<taken> take_out(address from, std::size_t above) noexcept;
  void put_back(taken which) noexcept;
  /// Takes out any segment, whatever lives in it.
  std::optional<segment> remove_any() noexcept;

  bool has_reserve() const noexcept { return reserve_; }
  std::size_t free_bytes() const noexcept { return free_bytes_; }

 private:
  block* take_from(block::free_set& from, std::size_t bytes, bool any);
  block::free_set& set_of(const block& which) noexcept {
    return which.in->reserve ? reserved_free_ : free_;
  }
  void enter(block& which) noexcept;
  void leave(block& which) noexcept;

  std::map<address, segment> segments_;
  std::map<address, block> blocks_;  ///< they cover the segments
  block::free_set free_;
  block::free_set reserved_free_;
  std::size_t free_bytes_ = 0;
  bool reserve_ = false;
};

}  // namespace evmm::pinned
