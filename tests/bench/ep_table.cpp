// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ep_table.hpp"

#include <fmt/format.h>

#include <optional>
#include <ostream>

namespace evmm::bench {

namespace {

struct column {
  const char* counter;
  const char* head;
  const char* unit;
  int digits;
};

constexpr column k_columns[] = {
    {"sms", "SMs", "", 0},
    {"median_us", "median", "us", 1},
    {"logical_GBps", "logical", "GB/s", 1},
    {"physical_GBps", "physical", "GB/s", 1},
    {"busiest_GBps", "busiest", "GB/s", 1},
    {"spilled_rows", "spilled", "rows", 0},
    {"spilled_MB", "spilled", "MB", 1},
    {"hbm_saved_MiB", "HBM saved", "MiB", 0},
};

/// Why a run has no numbers, by the members of Google Benchmark up to 1.7, and later.
template <class Run>
std::optional<std::string> failure_of(const Run& of) {
  if constexpr (requires { of.error_occurred; }) {
    if (of.error_occurred) return of.error_message;
  } else {
    if (of.skipped) return of.skip_message;
  }
  return std::nullopt;
}

/// "dispatch_fp8" of "ep/dispatch_fp8/tokens:4096/sms:24".
std::string group_of(const std::string& name) {
  const std::size_t begin = name.find('/') + 1;
  return name.substr(begin, name.find('/', begin) - begin);
}

}  // namespace

bool ep_table::ReportContext(const Context&) {
  auto& out = GetOutputStream();
  for (const auto unit : {false, true}) {
    out << fmt::format("{:<76}", unit ? "" : "case");
    for (const column& each : k_columns) {
      out << fmt::format("{:>11}", unit ? each.unit : each.head);
    }
    out << '\n';
  }
  return true;
}

void ep_table::ReportRuns(const std::vector<Run>& runs) {
  auto& out = GetOutputStream();
  for (const Run& each : runs) {
    if (each.run_type == Run::RT_Aggregate) continue;
    const std::string name = each.run_name.function_name;
    if (group_of(name) != last_group_) out << '\n';
    last_group_ = group_of(name);
    out << fmt::format("{:<76}", name);
    if (const auto why = failure_of(each)) {
      out << "  " << *why << '\n';
      continue;
    }
    for (const column& wanted : k_columns) {
      const auto counter = each.counters.find(wanted.counter);
      out << (counter == each.counters.end()
                  ? fmt::format("{:>11}", "-")
                  : fmt::format("{:>11.{}f}", counter->second.value, wanted.digits));
    }
    if (!each.report_label.empty()) out << "  " << each.report_label;
    out << '\n';
  }
  out.flush();
}

}  // namespace evmm::bench
