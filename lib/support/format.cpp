// SPDX-License-Identifier: Apache-2.0
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <array>
#include <charconv>
#include <limits>

namespace evmm {

namespace {
constexpr std::array<std::string_view, 5> k_units = {"B", "KiB", "MiB", "GiB", "TiB"};
}  // namespace

std::string format_bytes(std::size_t bytes) {
  std::size_t unit = 0;
  auto value = static_cast<double>(bytes);
  while (value >= 1024.0 && unit + 1 < k_units.size()) {
    value /= 1024.0;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, k_units[unit]);
}

std::string format_address(address at) {
  return fmt::format("{:#x}", at);
}

std::size_t parse_bytes(std::string_view text, std::string_view what) {
  const auto refuse = [&]() -> std::size_t {
    throw invalid_argument(fmt::format("{} is '{}', which is not a size", what, text),
                           "write bytes as 4096, 64K, 512M, 2G or 1T (powers of two)");
  };
  std::size_t value = 0;
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc{}) return refuse();
  std::string_view unit = text.substr(static_cast<std::size_t>(end - text.data()));
  while (!unit.empty() && unit.front() == ' ') unit.remove_prefix(1);
  for (std::size_t i = 0; i < k_units.size(); ++i) {
    // "M", "MB" and "MiB" all mean the power of two; an empty unit is bytes.
    const std::string_view full = k_units[i];
    const bool matches = i == 0 ? unit.empty() || unit == "B"
                                : unit == full || unit == full.substr(0, 1) ||
                                      (unit.size() == 2 && unit[0] == full[0] && unit[1] == 'B');
    if (!matches) continue;
    const std::size_t shift = 10 * i;
    if (value > (std::numeric_limits<std::size_t>::max() >> shift)) return refuse();
    return value << shift;
  }
  return refuse();
}

std::string to_string(tier kind) {
  return kind == tier::device ? "DEVICE" : "HOST_NUMA";
}

std::string to_string(memory_location where) {
  return fmt::format("{} {}", to_string(where.kind), where.index);
}

}  // namespace evmm
