// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/size_rules.hpp"

#include "lib/memory/segment_plan.hpp"

#include <evmm/units.hpp>

#include <bit>
#include <limits>

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

bool size_rules::splits(size_class kind, std::size_t bytes, std::size_t taken,
                        bool expandable) const noexcept {
  const allocator_options& now = options_.now();
  const std::size_t rest = bytes - taken;
  if (kind == size_class::small || expandable) return rest >= now.min_block;
  if (now.max_split_size && taken >= *now.max_split_size) return false;
  return rest > now.small_limit;
}

std::size_t size_rules::largest_fit(std::size_t wanted, bool expandable) const noexcept {
  const allocator_options& now = options_.now();
  constexpr std::size_t any = std::numeric_limits<std::size_t>::max();
  if (expandable || !now.max_split_size) return any;
  if (wanted < *now.max_split_size) return *now.max_split_size - 1;
  const std::size_t slack = now.max_non_split_rounding.value_or(now.large_segment);
  return wanted > any - slack ? any : wanted + slack - 1;
}

}  // namespace evmm
