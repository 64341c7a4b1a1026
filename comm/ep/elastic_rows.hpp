// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/heap_source.hpp"

#include <cstddef>
#include <optional>

namespace evmm::ep {

/// Rows in the heap, packed from the front: those up to a border lie in DEVICE memory, those beyond
/// it in HOST_NUMA memory. All members but the observers are collective.
class elastic_rows {
 public:
  /// `rows` of `row_bytes`, of which `device_rows` lie on the device: all of them in the heap's own
  /// segments, or in segments of their own, `steps` in each tier, which move_border() moves.
  elastic_rows(heap_source& from, std::size_t rows, std::size_t row_bytes, std::size_t device_rows,
               int steps);
  elastic_rows(const elastic_rows&) = delete;
  elastic_rows& operator=(const elastic_rows&) = delete;

  char* local() const { return reinterpret_cast<char*>(bytes_.local()); }
  std::size_t offset() const { return bytes_.offset(); }
  /// Rows that lie on the device as a whole.
  std::size_t device_rows() const;
  /// Half of a move of the border to the first end of a segment that leaves `device_rows` on the
  /// device: what then lies in `kind` goes there. Host memory first makes room on the device.
  void move_border(tier kind, std::size_t device_rows, const uses& in_use);

 private:
  std::size_t rows_, row_bytes_;
  std::optional<owned_pool> pool_;
  symmetric_buffer<std::byte> bytes_;
};

}  // namespace evmm::ep
