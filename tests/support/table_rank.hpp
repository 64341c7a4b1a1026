// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/symmetric_cases.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/table.hpp>

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace evmm::test {

/// One rank's side of a table: its heap, a stream, tensors, and what rows must hold. Which version
/// of a row was written last is known to every rank alike.
class table_rank {
 public:
  /// With tensors for gathers of up to `most` indices.
  table_rank(const rank_context& at, ep::table_options options, std::size_t most);
  table_rank(const table_rank&) = delete;
  table_rank& operator=(const table_rank&) = delete;
  ~table_rank();

  int me() const { return at_.ranks->rank().value; }
  native_stream stream() const { return stream_; }
  ep::table& table() { return table_; }
  symmetric_heap& heap() { return heap_; }
  driver& on() const { return *at_.on; }

  /// Each rank writes its share of all rows in this version, and all meet.
  void fill(std::uint32_t version);
  /// All ranks' streams are past their work.
  void meet();

  /// Uploads indices; what they name must stay until the work on them is done.
  std::span<const std::int64_t> upload(const std::vector<std::int64_t>& indices);
  std::byte* out() const { return out_.local(); }
  /// Writes over the output, to find rows that do not come.
  void clear(std::size_t rows);
  /// Places of the output that do not hold the rows asked for; with -1, that were touched.
  std::size_t wrong(const std::vector<std::int64_t>& indices);
  /// Gathers and compares; returns what wrong() does.
  std::size_t gather(const std::vector<std::int64_t>& indices, const ep::gather_options& how = {});
  /// Scatters the rows in this version. Peers that are to know call written() with the same.
  void scatter(const std::vector<std::int64_t>& indices, std::uint32_t version);
  void written(const std::vector<std::int64_t>& indices, std::uint32_t version);

  std::vector<std::byte> row(std::size_t index) const;
  std::vector<std::byte> row(std::size_t index, std::uint32_t version) const;

 private:
  const rank_context& at_;
  symmetric_heap heap_;
  ep::table table_;
  native_stream stream_;
  std::vector<std::uint32_t> versions_;
  symmetric_buffer<std::int64_t> indices_;
  symmetric_buffer<std::byte> out_;
};

/// `count` indices below `rows`; one in `repeat` (0: none) is one of the first eight, one in
/// `masked` (0: none) is -1.
std::vector<std::int64_t> random_indices(std::size_t count, std::size_t rows, std::uint64_t seed,
                                         unsigned repeat = 0, unsigned masked = 0);

}  // namespace evmm::test
