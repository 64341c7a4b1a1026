// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/device/symmetric_view.cuh>
#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace evmm::bench {

/// What a rank must have received, in memory of its device: rows by source, then by token.
struct ep_expected {
  std::size_t rows = 0;
  const std::int32_t* sources = nullptr;  ///< [rows]
  const std::int32_t* tokens = nullptr;   ///< [rows]: index at the source
  const std::int32_t* experts = nullptr;  ///< [rows][top_k]
  const float* weights = nullptr;         ///< [rows][top_k]
  /// Where every rank's own rows and scales lie in its part of the heap.
  std::uint64_t x = 0;
  std::uint64_t scales = 0;
  std::size_t row_words = 0;  ///< of 8 bytes
  int scale_count = 0;        ///< of a row; 0 for none
  int top_k = 0;
};

/// What it did receive. What is null is not compared.
struct ep_rows {
  const void* x = nullptr;
  const float* scales = nullptr;
  const std::int32_t* tokens = nullptr;
  const std::int32_t* experts = nullptr;
  const float* weights = nullptr;
};

/// What the EP benchmark needs beside the exchange: a stream's time by events, a cold L2 cache, all
/// ranks at one point, and the check of what arrived.
class ep_probe {
 public:
  /// `barrier_offset` names view.ranks flags in the heap, zero.
  ep_probe(device_id device, const symmetric_view& view, std::uint64_t barrier_offset);
  ~ep_probe();
  ep_probe(const ep_probe&) = delete;
  ep_probe& operator=(const ep_probe&) = delete;

  native_stream stream() const;
  /// Writes over the L2 cache, and waits on the stream until all ranks have done so.
  void prepare();
  void begin();
  /// Seconds since begin(); blocks.
  double end();
  /// Random bits that tell rows apart.
  void fill(void* at, std::size_t bytes, std::uint64_t seed);
  /// How many rows differ from what lies at their sources.
  std::size_t wrong_rows(const ep_rows& got, const ep_expected& expected);
  /// Writes to `y`, bf16 row after row, what tells rank, source, token and element apart, and adds
  /// up without rounding on up to 8 ranks.
  void fill_results(void* y, const ep_expected& expected, std::size_t hidden);
  /// How many elements of `out` are not the sum of those of the ranks in the tokens' masks.
  std::size_t wrong_sums(const void* out, const std::uint64_t* masks, std::size_t tokens,
                         std::size_t hidden);

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm::bench
