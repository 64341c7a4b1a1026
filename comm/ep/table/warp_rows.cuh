// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/table/table_shape.hpp"

#include <cstdint>

namespace evmm::ep {

constexpr unsigned k_all_lanes = 0xffffffffu;
/// Loads of 16 bytes that a thread has under way.
constexpr int k_loads = 8;

/// The rows that one warp copies, in shared memory: up to 32, each to every place that asked for
/// it, and perhaps into the cache.
struct warp_rows {
  const char* from[32];
  char* copy[32];            ///< null for none
  std::uint32_t takers[32];  ///< lanes whose places take the row
  std::uint32_t place[32];   ///< by lane
};

/// Lists this warp's rows: each lane has one (`row`), or k_no_row. Lanes with the same row share an
/// entry. Returns how many entries there are; `address` and `copy` count where the lane leads.
__device__ __forceinline__ int list_rows(warp_rows& list, std::uint32_t row, std::uint32_t place,
                                         const char* address, char* copy, int lane) {
  const unsigned same = __match_any_sync(k_all_lanes, row);
  const bool leads = row != k_no_row && __ffs(static_cast<int>(same)) - 1 == lane;
  const unsigned leaders = __ballot_sync(k_all_lanes, leads);
  __syncwarp();  // the list before is done with
  list.place[lane] = place;
  if (leads) {
    const int entry = __popc(leaders & ((1u << lane) - 1));
    list.from[entry] = address;
    list.copy[entry] = copy;
    list.takers[entry] = same;
  }
  __syncwarp();
  return __popc(leaders);
}

/// Copies bytes [begin, begin + bytes) of each row listed. Rows follow each other without gaps, so
/// that all lanes load whatever the size of a row.
__device__ __forceinline__ void copy_rows(const warp_rows& list, int entries, char* out,
                                          std::uint32_t row_bytes, std::uint32_t begin,
                                          std::uint32_t bytes, int lane) {
  const std::uint32_t words = bytes / sizeof(uint4);
  const std::uint32_t all = static_cast<std::uint32_t>(entries) * words;
  for (std::uint32_t first = static_cast<std::uint32_t>(lane); first < all; first += 32 * k_loads) {
    uint4 loaded[k_loads];
    std::uint32_t entry[k_loads];
    std::uint32_t offset[k_loads];
#pragma unroll
    for (int i = 0; i < k_loads; ++i) {
      const std::uint32_t word = first + 32 * static_cast<std::uint32_t>(i);
      if (word >= all) continue;
      entry[i] = word / words;
      offset[i] = begin + (word - entry[i] * words) * static_cast<std::uint32_t>(sizeof(uint4));
      loaded[i] = __ldcg(reinterpret_cast<const uint4*>(list.from[entry[i]] + offset[i]));
    }
#pragma unroll
    for (int i = 0; i < k_loads; ++i) {
      const std::uint32_t word = first + 32 * static_cast<std::uint32_t>(i);
      if (word >= all) continue;
      for (unsigned takers = list.takers[entry[i]]; takers != 0; takers &= takers - 1) {
        const std::uint32_t place = list.place[__ffs(static_cast<int>(takers)) - 1];
        *reinterpret_cast<uint4*>(out + static_cast<std::uint64_t>(place) * row_bytes + offset[i]) =
            loaded[i];
      }
      if (char* const copy = list.copy[entry[i]]; copy != nullptr) {
        *reinterpret_cast<uint4*>(copy + offset[i]) = loaded[i];
      }
    }
  }
}

/// The row that an index names; k_no_row for -1 and, remembered, for one that there is not.
__device__ __forceinline__ std::uint32_t row_named(const table_shape& shape, std::int64_t index,
                                                   std::uint64_t place) {
  if (index >= 0 && static_cast<std::uint64_t>(index) < shape.view.rows) {
    return static_cast<std::uint32_t>(index);
  }
  if (index != -1 && atomicCAS(reinterpret_cast<unsigned long long*>(&shape.counts->wrong_place),
                               0ull, place + 1) == 0) {
    shape.counts->wrong_index = index;
  }
  return k_no_row;
}

__device__ __forceinline__ void count_up(std::uint64_t* at, std::uint64_t by) {
  atomicAdd(reinterpret_cast<unsigned long long*>(at), static_cast<unsigned long long>(by));
}

}  // namespace evmm::ep
