// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/table/table_shape.hpp"

#include <cstdint>

// The device cache of a table: sets of `k_ways` rows, found by a hash of the row. A tag says which
// row a way holds and in which round it was wanted last; the way that was not wanted for longest
// gives room. A way that was wanted or filled in a round stays until the next, so that whoever
// found it may read it and whoever fills it is alone. Tags are changed by compare-and-swap only:
// peers that write a row take its tag away.

namespace evmm::ep {

constexpr std::uint32_t k_ways = 8;

EVMM_HOST_DEVICE std::uint64_t load_tag(const std::uint64_t* at) {
#if defined(__CUDA_ARCH__)
  return *reinterpret_cast<const volatile std::uint64_t*>(at);
#else
  return __atomic_load_n(at, __ATOMIC_RELAXED);
#endif
}
EVMM_HOST_DEVICE bool replace_tag(std::uint64_t* at, std::uint64_t before, std::uint64_t after) {
#if defined(__CUDA_ARCH__)
  return atomicCAS_system(reinterpret_cast<unsigned long long*>(at), before, after) == before;
#else
  return __atomic_compare_exchange_n(at, &before, after, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
#endif
}

/// 0 is an empty way.
EVMM_HOST_DEVICE std::uint64_t make_tag(std::uint32_t row, std::uint32_t round) {
  return (static_cast<std::uint64_t>(row) + 1) << 32 | round;
}
EVMM_HOST_DEVICE bool holds(std::uint64_t tag, std::uint32_t row) {
  return tag >> 32 == static_cast<std::uint64_t>(row) + 1;
}

EVMM_HOST_DEVICE std::uint32_t set_of(std::uint32_t row, std::uint32_t sets) {
  std::uint32_t hash = row * 0x9e3779b1u;
  hash = (hash ^ (hash >> 16)) * 0x85ebca6bu;
  hash ^= hash >> 13;
  return static_cast<std::uint32_t>(static_cast<std::uint64_t>(hash) * sets >> 32);
}

/// The slot that holds a row, marked as wanted in this round; k_no_row where none does.
EVMM_HOST_DEVICE std::uint32_t find_copy(const table_shape& shape, std::uint32_t row,
                                         std::uint32_t round) {
  const std::uint32_t first = set_of(row, shape.sets) * k_ways;
  std::uint64_t* const tags = shape.at<std::uint64_t>(shape.view.rank, shape.tags) + first;
  for (std::uint32_t way = 0; way < k_ways; ++way) {
    const std::uint64_t tag = load_tag(tags + way);
    if (!holds(tag, row)) continue;
    // Others of this rank may have marked it meanwhile, and that will do.
    if (tag != make_tag(row, round)) replace_tag(tags + way, tag, make_tag(row, round));
    return first + way;
  }
  return k_no_row;
}

/// A slot to keep a copy of a row in, whose tag says so already; k_no_row where the row has one or
/// none is free. To be filled within the round.
EVMM_HOST_DEVICE std::uint32_t claim_copy(const table_shape& shape, std::uint32_t row,
                                          std::uint32_t round) {
  const std::uint32_t first = set_of(row, shape.sets) * k_ways;
  std::uint64_t* const tags = shape.at<std::uint64_t>(shape.view.rank, shape.tags) + first;
  for (std::uint32_t tries = 0; tries < k_ways; ++tries) {
    std::uint32_t oldest = k_no_row;
    std::uint32_t age = 0;
    std::uint64_t seen = 0;
    for (std::uint32_t way = 0; way < k_ways; ++way) {
      const std::uint64_t tag = load_tag(tags + way);
      if (holds(tag, row)) return k_no_row;
      const std::uint32_t unused = tag == 0 ? ~0u : round - static_cast<std::uint32_t>(tag);
      if (unused <= age) continue;
      oldest = way;
      age = unused;
      seen = tag;
    }
    if (oldest == k_no_row) return k_no_row;
    if (replace_tag(tags + oldest, seen, make_tag(row, round))) return first + oldest;
  }
  return k_no_row;
}

/// Takes a row's copies away from a rank's cache.
EVMM_HOST_DEVICE void drop_copies(const table_shape& shape, int of_rank, std::uint32_t row) {
  std::uint64_t* const tags =
      shape.at<std::uint64_t>(of_rank, shape.tags) + set_of(row, shape.sets) * k_ways;
  for (std::uint32_t way = 0; way < k_ways; ++way) {
    for (std::uint64_t tag = load_tag(tags + way); holds(tag, row); tag = load_tag(tags + way)) {
      if (replace_tag(tags + way, tag, 0)) break;
    }
  }
}

/// Takes the copy in a slot away when it is of one of the rows [first, first + count).
EVMM_HOST_DEVICE void drop_slot(const table_shape& shape, int of_rank, std::uint64_t slot,
                                std::uint64_t first, std::uint64_t count) {
  std::uint64_t* const at = shape.at<std::uint64_t>(of_rank, shape.tags) + slot;
  for (std::uint64_t tag = load_tag(at); tag != 0; tag = load_tag(at)) {
    const std::uint64_t row = (tag >> 32) - 1;
    if (row < first || row - first >= count || replace_tag(at, tag, 0)) return;
  }
}

}  // namespace evmm::ep
