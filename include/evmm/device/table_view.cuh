// SPDX-License-Identifier: Apache-2.0
#pragma once

// For kernels and host code alike: needs no library, only this header. C++17.

#include <evmm/device/symmetric_view.cuh>

#include <cstdint>

namespace evmm {

/// Where the rows of an ep::table lie: a plain struct, passed by value. Row i is row
/// i % rows_per_rank of rank i / rows_per_rank. Addresses hold as long as the table does, whatever
/// tier its memory moves to.
struct table_view {
  char* first = nullptr;            ///< the first row of rank 0
  std::uint64_t stride = 0;         ///< bytes from a rank's first row to the next rank's
  std::uint64_t rows = 0;           ///< of all ranks together
  std::uint64_t rows_per_rank = 0;  ///< the last ranks may have fewer, or none
  std::uint32_t row_bytes = 0;      ///< a multiple of 16
  int rank = 0;                     ///< this rank
  int ranks = 1;

  EVMM_HOST_DEVICE int owner(std::uint64_t row) const {
    return static_cast<int>(row / rows_per_rank);
  }
  /// The address of a row, in this rank's mappings.
  template <class T = char>
  EVMM_HOST_DEVICE T* row(std::uint64_t index) const {
    const std::uint64_t of_rank = index / rows_per_rank;
    return reinterpret_cast<T*>(first + of_rank * stride +
                                (index - of_rank * rows_per_rank) * row_bytes);
  }
};

}  // namespace evmm
