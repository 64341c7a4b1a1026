// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/segment_plan.hpp"

#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>

namespace evmm {

std::size_t round_up(std::size_t bytes, std::size_t granularity) {
  if (bytes > std::numeric_limits<std::size_t>::max() - (granularity - 1)) {
    throw invalid_argument(
        fmt::format("{} bytes overflow when rounded up to {}", bytes, format_bytes(granularity)));
  }
  return (bytes + granularity - 1) / granularity * granularity;
}

std::size_t next_segment_bytes(const segment_limits& limits, std::size_t size, std::size_t segments,
                               std::size_t bytes) {
  if (bytes == 0) {
    throw invalid_argument("cannot grow by 0 bytes", "ask for at least one byte");
  }
  const std::size_t room = limits.reserved - size;
  const std::size_t asked = bytes > room ? bytes : round_up(bytes, limits.granularity);
  if (asked > room) {
    throw invalid_argument(
        fmt::format("cannot grow by {} ({} bytes): {} of the {} reserved are in use",
                    format_bytes(bytes), bytes, format_bytes(size), format_bytes(limits.reserved)),
        "raise `reserve`; reserving addresses costs no memory");
  }
  if (segments >= limits.max_segments) {
    throw invalid_argument(
        fmt::format("cannot grow by {}: the region has its {} segments", format_bytes(bytes),
                    limits.max_segments),
        "raise `max_segments`, grow in fewer, larger steps, shrink first, or merge "
        "segments (compact)");
  }
  // Reaching the reservation from s bytes in k steps of half the size needs s * 1.5^k >= reserved.
  const auto slots_left = static_cast<double>(limits.max_segments - segments - 1);
  const double least_size = static_cast<double>(limits.reserved) / std::pow(1.5, slots_left);
  const double needed = std::ceil(least_size) - static_cast<double>(size);
  const double step = std::clamp(needed, 0.0, static_cast<double>(size) / 2);
  const std::size_t rounded = round_up(static_cast<std::size_t>(step), limits.granularity);
  return std::min(std::max(asked, rounded), room);
}

std::vector<std::size_t> plan_growth(const segment_limits& limits, std::size_t size,
                                     std::size_t segments, std::size_t bytes) {
  const std::size_t total = next_segment_bytes(limits, size, segments, bytes);
  const std::size_t free_slots = limits.max_segments - segments;
  const std::size_t wanted = (total - 1) / limits.max_segment_bytes + 1;
  const std::size_t parts =
      std::clamp<std::size_t>(wanted, 1, std::max<std::size_t>(1, free_slots / 2));
  const std::size_t part = round_up((total + parts - 1) / parts, limits.granularity);
  std::vector<std::size_t> sizes;
  for (std::size_t left = total; left > 0; left -= sizes.back()) {
    sizes.push_back(std::min(part, left));
  }
  return sizes;
}

std::size_t tail_segments_within(std::span<const std::size_t> sizes, std::size_t bytes) {
  std::size_t count = 0;
  while (count < sizes.size() && sizes[sizes.size() - 1 - count] <= bytes) {
    bytes -= sizes[sizes.size() - 1 - count];
    ++count;
  }
  return count;
}

}  // namespace evmm
