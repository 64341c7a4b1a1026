// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/device/symmetric_view.cuh>
#include <evmm/ep/exchange.hpp>
#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>

namespace evmm::bench {

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
  /// Numbers that tell rows apart, and small bf16 values.
  void fill(void* at, std::size_t bytes, std::uint64_t seed);
  /// Of the rows received, how many are not what lies at `x_offset` of their sources' parts.
  std::size_t wrong_rows(const ep::received& got, std::uint64_t x_offset, std::size_t row_bytes);
  /// Writes to `y` row after row, as bf16, what adds up: combine must give `ranks` of a token times
  /// 1. Returns nothing; `wrong_sums` counts elements that differ from the number of ranks that the
  /// token went to.
  void fill_ones(void* y, std::size_t elements);
  std::size_t wrong_sums(const void* out, const std::int64_t* ids, std::size_t tokens, int top_k,
                         int local_experts, std::size_t hidden);

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm::bench
