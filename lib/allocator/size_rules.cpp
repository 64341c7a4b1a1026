// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/size_rules.hpp"

#include "lib/memory/segment_plan.hpp"

#include <evmm/units.hpp>

#include <bit>

namespace evmm {

using namespace evmm::units;

std::size_t size_rules::round_by_divisions(std::size_t bytes) const noexcept {
  const allocator_options& now = options_.now();
  const std::size_t least = now.min_block;
  unsigned divisions = 0;
  for (const rounding_step& step : now.roundup_power2_divisions) {
    if (bytes >= step.from) divisions = step.divisions;
  }
  if (divisions > 1 && bytes > least * divisions) {
    const std::size_t floor = std::bit_floor(bytes);
    const std::size_t step = floor / divisions;
    if (step >= 1) return (bytes + step - 1) / step * step;
  }
  return (bytes + least - 1) & ~(least - 1);
}

std::size_t size_rules::segment_bytes(std::size_t block_bytes) const noexcept {
  const allocator_options& now = options_.now();
  if (block_bytes <= now.small_limit) return now.small_segment;
  if (block_bytes < now.min_large) return now.large_segment;
  return round_up(block_bytes, now.small_segment);
}

}  // namespace evmm
