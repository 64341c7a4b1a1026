// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/device/table_view.cuh>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

// What the steps of a table need to know: plain structs, passed to kernels by value and used by
// the host functions alike.

namespace evmm::ep {

constexpr std::uint32_t k_no_row = 0xffffffffu;
/// Neighbours in the order of loading among which a row is loaded once.
constexpr std::uint32_t k_chunk = 32;

/// What a rank has counted, in its device memory.
struct table_counts {
  std::uint64_t gathered = 0;
  std::uint64_t hits = 0;
  std::uint64_t fetched = 0;
  std::uint64_t rounds = 0;       ///< batches gathered: the clock of the cache
  std::uint64_t wrong_place = 0;  ///< where an index was that there is not, plus 1; 0 for none
  std::int64_t wrong_index = 0;
};

/// A table as one rank sees it. Offsets are from a rank's part of the region.
struct table_shape {
  table_view view;
  table_counts* counts = nullptr;

  char* base = nullptr;  ///< of rank 0's part of the region
  std::uint64_t stride = 0;
  std::uint32_t sets = 0;    ///< of the cache; 0 for none
  std::uint64_t tags = 0;    ///< u64 [sets][k_ways]
  std::uint64_t copies = 0;  ///< [sets][k_ways][row_bytes]

  template <class T>
  EVMM_HOST_DEVICE T* at(int of_rank, std::uint64_t offset) const {
    return reinterpret_cast<T*>(base + static_cast<std::uint64_t>(of_rank) * stride + offset);
  }
  EVMM_HOST_DEVICE char* copy_of(std::uint32_t slot) const {
    return at<char>(view.rank, copies) + static_cast<std::uint64_t>(slot) * view.row_bytes;
  }

  /// Rows in the order in which this rank loads them: its own first, so that ranks in step do not
  /// all load from the same one.
  EVMM_HOST_DEVICE std::uint32_t key_of(std::uint64_t row) const {
    const std::uint64_t own = static_cast<std::uint64_t>(view.rank) * view.rows_per_rank;
    return static_cast<std::uint32_t>(row >= own ? row - own : row + keys() - own);
  }
  EVMM_HOST_DEVICE std::uint64_t row_of(std::uint32_t key) const {
    const std::uint64_t own = static_cast<std::uint64_t>(view.rank) * view.rows_per_rank;
    const std::uint64_t row = key + own;
    return row < keys() ? row : row - keys();
  }
  EVMM_HOST_DEVICE std::uint64_t keys() const {
    return static_cast<std::uint64_t>(view.ranks) * view.rows_per_rank;
  }
};

/// Bits [first, last) of a key; none are sorted by where there are none.
struct key_bits {
  int first = 0;
  int last = 0;
  EVMM_HOST_DEVICE bool any() const { return last > first; }
};

/// Part of a gather: at most max_batch indices.
struct gather_batch {
  const std::int64_t* indices = nullptr;
  char* out = nullptr;
  std::uint64_t place = 0;  ///< of the first index in the whole gather
  std::uint32_t count = 0;
  key_bits sorted_by;
  int sms = 0;  ///< 0: all
};

// --- when and how far to order ------------------------------------------------------------------

/// Host memory that a GPU loads from at random at the full rate of the link: beyond it loads miss
/// its translation caches (H200, measured with rows of 128 bytes).
constexpr std::size_t k_translation_reach = std::size_t{512} << 20;
/// What one translation covers: the granularity of HOST_NUMA memory.
constexpr std::size_t k_translation_page = std::size_t{2} << 20;

/// Whether loading in the order of addresses is faster, sorting included. Rates are an H200's; the
/// decision is far from sensitive to them.
inline bool worth_ordering(std::size_t count, std::size_t row_bytes, std::size_t host_bytes) {
  if (host_bytes <= k_translation_reach) return false;
  constexpr double link = 51e9;         // bytes a second
  constexpr double missing = 1 / 32e6;  // seconds a load that misses
  const auto loads = static_cast<double>(count);
  const double sorting = 25e-6 + loads * 50e-12;
  const double moving = loads * static_cast<double>(row_bytes) / link;
  // In order each page is missed once: how many of them does the batch touch?
  const double pages = static_cast<double>(host_bytes) / k_translation_page;
  const double touched = pages * -std::expm1(-loads / pages);
  const double as_given = std::max(moving, loads * missing);
  const double by_address = sorting + std::max(moving, touched * missing);
  // Where it costs next to nothing, loading duplicates once may be worth it.
  return by_address < as_given || sorting < moving / 32;
}

/// The bits of the keys to sort by. The translation reach alone would do with one digit of a radix
/// sort; but rows that many ask for are often neighbours in the table, and only where they are
/// apart in the order are their duplicates found. So all bits are sorted, or all but the two lowest
/// where that saves a digit: then a row is loaded at most once for every eight that want it.
inline key_bits bits_to_sort(std::uint64_t keys) {
  constexpr int digit = 8;
  const int bits = std::max(1, static_cast<int>(std::bit_width(keys - 1)));
  const int beyond = bits % digit;
  return {.first = bits > digit && beyond <= 2 ? beyond : 0, .last = bits};
}

}  // namespace evmm::ep
