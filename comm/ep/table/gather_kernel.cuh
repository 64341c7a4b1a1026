// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/table/hot_rows.hpp"
#include "comm/ep/table/warp_rows.cuh"

#include <cstdint>

namespace evmm::ep {

/// Of a block. One block fills a multiprocessor's registers; with 64 KiB of loads under way that is
/// as much as its memory path takes.
constexpr int k_gather_warps = 16;
/// Of a row: what one warp copies of 32 rows, so that large rows keep all warps busy.
constexpr std::uint32_t k_piece_bytes = 1024;

/// A batch in the order in which it is loaded. Null where the indices are taken as given.
struct batch_order {
  std::uint32_t* keys = nullptr;
  std::uint32_t* places = nullptr;
  std::uint32_t* slots = nullptr;  ///< of the cache, to fill; null without a cache
};

/// A row's copy of the cache, wanted in the round that the counts say comes next.
__device__ __forceinline__ std::uint32_t round_of(const table_shape& shape) {
  return static_cast<std::uint32_t>(shape.counts->rounds) + 1;
}

/// Makes keys of the indices. Rows that the cache has are copied here, and need no key.
__global__ void __launch_bounds__(k_gather_warps * 32)
    key_kernel(const __grid_constant__ table_shape shape,
               const __grid_constant__ gather_batch batch,
               const __grid_constant__ batch_order order) {
  __shared__ warp_rows lists[k_gather_warps];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t chunks = (batch.count + k_chunk - 1) / k_chunk;
  const std::uint32_t round = round_of(shape);
  std::uint32_t hits = 0;
  for (std::uint32_t chunk = blockIdx.x * k_gather_warps + static_cast<std::uint32_t>(warp);
       chunk < chunks; chunk += gridDim.x * k_gather_warps) {
    const std::uint32_t place = chunk * k_chunk + static_cast<std::uint32_t>(lane);
    const bool inside = place < batch.count;
    const std::uint32_t row =
        inside ? row_named(shape, batch.indices[place], batch.place + place) : k_no_row;
    std::uint32_t slot = k_no_row;
    if (shape.sets > 0) {
      if (row != k_no_row) slot = find_copy(shape, row, round);
      const int found = list_rows(lists[warp], slot, place,
                                  slot == k_no_row ? nullptr : shape.copy_of(slot), nullptr, lane);
      copy_rows(lists[warp], found, batch.out, shape.view.row_bytes, 0, shape.view.row_bytes, lane);
      hits += static_cast<std::uint32_t>(__popc(__ballot_sync(k_all_lanes, slot != k_no_row)));
    }
    if (!inside) continue;
    order.keys[place] = row == k_no_row || slot != k_no_row ? k_no_row : shape.key_of(row);
    order.places[place] = place;
  }
  if (lane == 0 && hits > 0) count_up(&shape.counts->hits, hits);
}

/// Finds room in the cache for rows that are going to be loaded.
__global__ void __launch_bounds__(k_gather_warps * 32)
    claim_kernel(const __grid_constant__ table_shape shape,
                 const __grid_constant__ gather_batch batch,
                 const __grid_constant__ batch_order order) {
  const std::uint32_t round = round_of(shape);
  const std::uint32_t threads = gridDim.x * blockDim.x;
  const std::uint32_t whole = (batch.count + k_chunk - 1) / k_chunk * k_chunk;
  for (std::uint32_t j = blockIdx.x * blockDim.x + threadIdx.x; j < whole; j += threads) {
    const std::uint32_t key = j < batch.count ? order.keys[j] : k_no_row;
    // Who leads here leads in gather_kernel, too.
    const unsigned same = __match_any_sync(k_all_lanes, key);
    const bool leads = __ffs(static_cast<int>(same)) - 1 == static_cast<int>(threadIdx.x % 32);
    if (j >= batch.count) continue;
    order.slots[j] = key != k_no_row && leads
                         ? claim_copy(shape, static_cast<std::uint32_t>(shape.row_of(key)), round)
                         : k_no_row;
  }
}

/// Loads rows in the order given and stores each where it is wanted. Neighbouring warps take
/// neighbouring rows, so that what a multiprocessor loads at one time lies close together.
__global__ void __launch_bounds__(k_gather_warps * 32)
    gather_kernel(const __grid_constant__ table_shape shape,
                  const __grid_constant__ gather_batch batch,
                  const __grid_constant__ batch_order order) {
  __shared__ warp_rows lists[k_gather_warps];
  const int warp = static_cast<int>(threadIdx.x / 32);
  const int lane = static_cast<int>(threadIdx.x % 32);
  const std::uint32_t row_bytes = shape.view.row_bytes;
  const std::uint32_t pieces = (row_bytes + k_piece_bytes - 1) / k_piece_bytes;
  const std::uint64_t items = std::uint64_t{(batch.count + k_chunk - 1) / k_chunk} * pieces;
  std::uint64_t fetched = 0;
  for (std::uint64_t item = std::uint64_t{blockIdx.x} * k_gather_warps + warp; item < items;
       item += std::uint64_t{gridDim.x} * k_gather_warps) {
    const auto chunk = static_cast<std::uint32_t>(item / pieces);
    const auto piece = static_cast<std::uint32_t>(item - std::uint64_t{chunk} * pieces);
    const std::uint32_t j = chunk * k_chunk + static_cast<std::uint32_t>(lane);
    std::uint32_t row = k_no_row;
    std::uint32_t place = j;
    char* copy = nullptr;
    if (j < batch.count && order.keys == nullptr) {
      row = row_named(shape, batch.indices[j], batch.place + j);
    } else if (j < batch.count) {
      const std::uint32_t key = order.keys[j];
      place = order.places[j];
      if (key != k_no_row) row = static_cast<std::uint32_t>(shape.row_of(key));
      const std::uint32_t slot = order.slots == nullptr ? k_no_row : order.slots[j];
      if (slot != k_no_row) copy = shape.copy_of(slot);
    }
    const int entries = list_rows(lists[warp], row, place,
                                  row == k_no_row ? nullptr : shape.view.row(row), copy, lane);
    const std::uint32_t begin = piece * k_piece_bytes;
    copy_rows(lists[warp], entries, batch.out, row_bytes, begin,
              min(k_piece_bytes, row_bytes - begin), lane);
    if (piece == 0) fetched += static_cast<std::uint64_t>(entries);
  }
  if (lane == 0 && fetched > 0) count_up(&shape.counts->fetched, fetched);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    count_up(&shape.counts->gathered, batch.count);
    count_up(&shape.counts->rounds, 1);
  }
}

// A warp a row.
__global__ void __launch_bounds__(k_gather_warps * 32)
    scatter_kernel(const __grid_constant__ table_shape shape, const std::int64_t* indices,
                   std::uint64_t count, const char* rows) {
  const std::uint32_t lane = threadIdx.x % 32;
  const std::uint64_t warps = std::uint64_t{gridDim.x} * k_gather_warps;
  const std::uint32_t words = shape.view.row_bytes / static_cast<std::uint32_t>(sizeof(uint4));
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * k_gather_warps + threadIdx.x / 32; i < count;
       i += warps) {
    const std::uint32_t row = row_named(shape, indices[i], i);
    if (row == k_no_row) continue;
    const auto* const from = reinterpret_cast<const uint4*>(rows + i * shape.view.row_bytes);
    auto* const to = shape.view.row<uint4>(row);
    for (std::uint32_t word = lane; word < words; word += 32) to[word] = __ldcg(from + word);
    if (shape.sets == 0) continue;
    for (int r = static_cast<int>(lane); r < shape.view.ranks; r += 32) drop_copies(shape, r, row);
  }
}

__global__ void __launch_bounds__(k_gather_warps * 32)
    drop_kernel(const __grid_constant__ table_shape shape, int first_rank, int ranks,
                std::uint64_t first, std::uint64_t count) {
  const std::uint64_t slots = std::uint64_t{shape.sets} * k_ways;
  const std::uint64_t threads = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x;
       i < slots * static_cast<std::uint64_t>(ranks); i += threads) {
    drop_slot(shape, first_rank + static_cast<int>(i / slots), i % slots, first, count);
  }
}

}  // namespace evmm::ep
