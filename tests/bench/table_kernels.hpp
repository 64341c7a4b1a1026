// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/device/table_view.cuh>
#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

namespace evmm::bench {

/// How indices are drawn.
struct index_draw {
  std::uint64_t first = 0;  ///< rows [first, first + count), around the end of the table
  std::uint64_t count = 0;
  double zipf = 0;  ///< its exponent, not 1; 0 for all alike. What is wanted often lies anywhere
};

/// What the table benchmark needs beside the table: rows that tell their numbers, indices, a
/// stream's time by events, a cold L2 cache, the ways that gather without a table, and the check.
class table_probe {
 public:
  /// With room for so many indices, and for their rows.
  table_probe(device_id device, std::size_t most, std::size_t out_bytes);
  ~table_probe();
  table_probe(const table_probe&) = delete;
  table_probe& operator=(const table_probe&) = delete;

  native_stream stream() const;
  void* out() const;
  /// Writes this rank's rows; blocks.
  void fill(const table_view& view);
  /// Draws indices, into memory of the device.
  std::span<const std::int64_t> draw(const table_view& view, const index_draw& how,
                                     std::size_t count, std::uint64_t seed);
  /// Consecutive rows, for the rate of the link.
  std::span<const std::int64_t> consecutive(std::size_t count);
  /// Writes over the output; blocks.
  void prepare(std::size_t out_bytes);
  /// Writes over the L2 cache, which takes the stream longer than the CPU takes to enqueue what
  /// comes next, and begins to count.
  void begin();
  /// Seconds since begin(); blocks.
  double end();
  /// Rows of the output that are not those asked for; blocks.
  std::size_t wrong(const table_view& view, std::span<const std::int64_t> indices);

  /// The plain way: a thread for each 16 bytes of the output, in the order of the indices.
  void plain(const table_view& view, std::span<const std::int64_t> indices);
  /// One cudaMemcpyAsync for each row.
  void copies(const table_view& view, std::span<const std::int64_t> indices);

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm::bench
