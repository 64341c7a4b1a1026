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
void grow_in_steps(symmetric_heap& heap, tier kind, std::size_t bytes, int steps, pool_id pool) {
  const std::size_t granule = heap.region().granularity();
  const std::size_t step = rounded_up(bytes / static_cast<std::size_t>(steps), granule);
  while (bytes > 0) {
    const std::size_t now = std::min(bytes, step);
    heap.grow(kind, now, pool);
    bytes -= now;
  }
}

}  // namespace

elastic_rows::elastic_rows(symmetric_heap& heap, std::size_t rows, std::size_t row_bytes,
                           std::size_t device_rows, int steps)
    : rows_(rows), row_bytes_(row_bytes) {
  const std::size_t bytes = rows * row_bytes;
  if (device_rows >= rows) {
    bytes_ = {heap, bytes, nullptr, {.tiers = tier_policy::device_only, .alignment = k_alignment}};
    return;
  }
  pool_.emplace(heap);
  const std::size_t granule = heap.region().granularity();
  const std::size_t all = rounded_up(bytes, granule);
  const std::size_t on_device = std::min(all, rounded_up(device_rows * row_bytes, granule));
  grow_in_steps(heap, tier::device, on_device, steps, pool_->id());
  grow_in_steps(heap, tier::host, all - on_device, steps, pool_->id());
  bytes_ = {
      heap, bytes, nullptr, {.may_span = true, .alignment = k_alignment, .pool = pool_->id()}};
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

void elastic_rows::move_border(std::size_t device_rows, const uses& in_use) {
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
  // Room on the device first.
  if (border < end) heap.migrate(border, end - border, tier::host, in_use);
  if (border > offset()) heap.migrate(offset(), border - offset(), tier::device, in_use);
}

}  // namespace evmm::ep
