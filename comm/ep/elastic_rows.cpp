// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/elastic_rows.hpp"

#include <algorithm>

namespace evmm::ep {

namespace {

constexpr std::size_t k_alignment = 4096;

std::size_t rounded_up(std::size_t bytes, std::size_t granule) {
  return (bytes + granule - 1) / granule * granule;
}

/// Appends `bytes` to a pool, in up to `steps` segments.
void grow_in_steps(heap_source& from, tier kind, std::size_t bytes, int steps,
                   const std::optional<owned_pool>& pool) {
  const std::size_t step = rounded_up(bytes / static_cast<std::size_t>(steps), from.granularity());
  while (bytes > 0) {
    const std::size_t now = std::min(bytes, step);
    from.grow(kind, now, pool);
    bytes -= now;
  }
}

}  // namespace

elastic_rows::elastic_rows(heap_source& from, std::size_t rows, std::size_t row_bytes,
                           std::size_t device_rows, int steps)
    : rows_(rows), row_bytes_(row_bytes) {
  const std::size_t bytes = rows * row_bytes;
  if (device_rows >= rows) {
    bytes_ = from.make<std::byte>(bytes, k_alignment);
    return;
  }
  if (from.heap() != nullptr) pool_.emplace(*from.heap());
  const std::size_t granule = from.granularity();
  const std::size_t all = rounded_up(bytes, granule);
  const std::size_t on_device = std::min(all, rounded_up(device_rows * row_bytes, granule));
  grow_in_steps(from, tier::device, on_device, steps, pool_);
  grow_in_steps(from, tier::host, all - on_device, steps, pool_);
  if (!pool_) return;
  bytes_ = {*from.heap(),
            bytes,
            nullptr,
            {.may_span = true, .alignment = k_alignment, .pool = pool_->id()}};
}

std::size_t elastic_rows::device_rows() const {
  if (!pool_) return rows_;
  const symmetric_region& region = bytes_.heap().region();
  std::size_t end = offset();
  for (const segment& one : region.segments(region.ranks().rank())) {
    if (one.offset + one.bytes <= end || one.offset > end) continue;
    if (one.where.kind != tier::device) break;
    end = one.offset + one.bytes;
  }
  return std::min(rows_, (end - offset()) / row_bytes_);
}

void elastic_rows::move_border(tier kind, std::size_t device_rows, const uses& in_use) {
  if (!pool_) return;
  symmetric_heap& heap = bytes_.heap();
  const symmetric_region& region = heap.region();
  const std::size_t wanted = offset() + std::min(rows_, device_rows) * row_bytes_;
  const std::size_t end = offset() + bytes_.bytes();
  std::size_t border = offset();
  for (const segment& one : region.segments(region.ranks().rank())) {
    if (border < wanted && one.offset + one.bytes > border) {
      border = std::min(one.offset + one.bytes, end);
    }
  }
  const std::size_t from = kind == tier::device ? offset() : border;
  const std::size_t to = kind == tier::device ? border : end;
  if (from < to) heap.migrate(from, to - from, kind, in_use);
}

}  // namespace evmm::ep
