// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/replay.hpp"
#include "lib/support/format.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <filesystem>

namespace evmm::cli {

namespace {

std::string size_text(std::int64_t bytes) {
  return format_bytes(static_cast<std::size_t>(std::max<std::int64_t>(bytes, 0)));
}

}  // namespace

double replay_pass::reserved_over_allocated() const {
  if (peak_allocated_bytes == 0) return 0;
  return static_cast<double>(peak_reserved_bytes) / static_cast<double>(peak_allocated_bytes);
}

nlohmann::ordered_json to_json(const replay_report& report) {
  auto json = nlohmann::ordered_json::array();
  for (const replay_pass& each : report.passes) {
    json.push_back({{"trace", each.trace},
                    {"pass", each.pass},
                    {"events", each.events},
                    {"ns_per_event", each.ns_per_event},
                    {"peak_allocated_bytes", each.peak_allocated_bytes},
                    {"peak_reserved_bytes", each.peak_reserved_bytes},
                    {"reserved_over_allocated", each.reserved_over_allocated()},
                    {"driver_calls", each.driver_calls},
                    {"time_in_driver_calls_ns", each.time_in_driver_calls_ns},
                    {"segments", each.segments},
                    {"created_handles", each.created_handles},
                    {"recycled_handles", each.recycled_handles},
                    {"claimed_handles", each.claimed_handles}});
  }
  return json;
}

std::string to_text(const replay_report& report) {
  std::string text;
  std::string trace;
  for (const replay_pass& each : report.passes) {
    if (each.pass == 0) {
      text += fmt::format("{}{}: {} events\n", text.empty() ? "" : "\n",
                          std::filesystem::path(each.trace).filename().string(), each.events);
      text += fmt::format("{:>6}{:>12}{:>14}{:>14} {:>9}{:>10}{:>11}{:>10}{:>9}{:>10}{:>9}\n",
                          "pass", "ns / event", "allocated", "reserved", "ratio", "driver",
                          "in driver", "segments", "created", "recycled", "claimed");
    }
    text += fmt::format(
        "{:>6}{:>12.1f}{:>14}{:>14} {:>9.4f}{:>10}{:>8.2f} ms{:>10}{:>9}{:>10}{:>9}\n", each.pass,
        each.ns_per_event, size_text(each.peak_allocated_bytes),
        size_text(each.peak_reserved_bytes), each.reserved_over_allocated(), each.driver_calls,
        static_cast<double>(each.time_in_driver_calls_ns) * 1e-6, each.segments,
        each.created_handles, each.recycled_handles, each.claimed_handles);
  }
  return text;
}

}  // namespace evmm::cli
