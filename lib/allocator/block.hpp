// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/size_rules.hpp"

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

class arena;
struct segment_record;
struct call_stack;

enum class block_use : std::uint8_t {
  none,       ///< not a block now: the record waits to be used again
  allocated,  ///< live
  lent,       ///< live, and used by other streams too (record_stream)
  pending,    ///< freed, but other streams may still use it
  recent,     ///< freed, not merged with its neighbours yet; reusable at its exact size
  free,       ///< free, with memory behind all of it; never beside another free block
  kept,       ///< free, with memory that is being put to use elsewhere or next to it: nobody's
  hole,       ///< free addresses that need memory before use; never beside another hole
};

/// A run of addresses of one segment: live, free, or without memory. The blocks of a segment cover
/// it without gaps.
///
/// Records are reused and never given back while their arena lives, so that a stale pointer to
/// one can be read, and found out, under the arena's lock. The first cache line has what the hot
/// path touches, and what a search among runs does.
struct alignas(64) block {
  address at = 0;
  std::size_t bytes = 0;
  union {
    std::size_t requested = 0;  ///< live or pending: what the caller asked for
    std::size_t run_bytes;      ///< first of a run of free blocks and holes: bytes of the run
  };
  block* left = nullptr;  ///< in the tree of runs; the list of recent blocks
  block* right = nullptr;
  std::size_t run_free = 0;   ///< first of a run: bytes of its largest free block
  std::size_t most_free = 0;  ///< in the tree of runs: none below here has a larger one
  std::uint16_t bin = 0;      ///< first of a run: which tree it belongs in
  block_use use = block_use::none;
  std::uint8_t extra = 0;      ///< live: what free() has to do besides, as the bits below
  std::uint32_t freed_at = 0;  ///< the allocator's clock when it was last freed

  block* before = nullptr;  ///< neighbours in the segment
  block* after = nullptr;
  arena* owner = nullptr;
  segment_record* in = nullptr;
  std::uint32_t pending_events = 0;
  std::unique_ptr<std::vector<native_stream>> other_streams;  ///< told by record_stream
  std::shared_ptr<const call_stack> stack;  ///< of its allocation, when that is recorded

  static constexpr std::uint8_t k_oversize = 1;  ///< counted so, whatever the options say now
  static constexpr std::uint8_t k_stack = 2;     ///< there is one

  /// Its addresses are free, with or without memory.
  bool vacant() const noexcept { return use == block_use::free || use == block_use::hole; }
  bool live() const noexcept { return use == block_use::allocated || use == block_use::lent; }
};

}  // namespace evmm
