// SPDX-License-Identifier: Apache-2.0
#include "report.hpp"

#include <fmt/format.h>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <iterator>

namespace moe {

namespace {

using out = std::back_insert_iterator<std::string>;

/// "DEVICE 10.0 MiB | HOST_NUMA 52.0 MiB"; which device and which node, the rank's line says.
std::string segments_text(const std::vector<evmm::segment>& segments) {
  std::string text;
  for (const auto& part : segments) {
    if (!text.empty()) text += " | ";
    text += fmt::format("{} {}", evmm::to_string(part.where.kind), size_text(part.bytes));
  }
  return text;
}

void print_setting(out to, const run_record& run) {
  fmt::format_to(to, "moe exchange: {} ranks, driver {}\n", run.ranks, run.driver);
  for (std::size_t r = 0; r < run.rank_lines.size(); ++r) {
    fmt::format_to(to, "  rank {}: {}\n", r, run.rank_lines[r]);
  }
  fmt::format_to(to, "routing: {}\n", run.routing);
  fmt::format_to(to, "hidden {} (bf16), {} steps\n", run.hidden, run.steps);
  fmt::format_to(to,
                 "receive buffer of each rank: expected {} rows = {}, worst case {} rows = {}\n",
                 run.expected_rows, size_text(run.expected_rows * run.row_bytes), run.worst_rows,
                 size_text(run.worst_rows * run.row_bytes));
  fmt::format_to(to, "device: {}{}\n\n", size_text(run.device_capacity),
                 run.device_cap == 0 ? std::string{}
                                     : fmt::format(", the region's DEVICE part capped at {}",
                                                   size_text(run.device_cap)));
}

void print_segments(out to, const run_record& run) {
  fmt::format_to(to, "segments\n");
  const moment* before = nullptr;
  for (const auto& at : run.moments) {
    if (before != nullptr && before->epoch == at.epoch) continue;  // a step changes none
    before = &at;
    fmt::format_to(to, "  epoch {:>2}  {}\n", at.epoch, at.label);
    std::vector<std::string> lines;
    for (const auto& segments : at.segments) lines.push_back(segments_text(segments));
    if (std::equal(lines.begin() + 1, lines.end(), lines.begin())) {
      fmt::format_to(to, "            each rank: {}\n", lines[0]);
      continue;
    }
    for (std::size_t r = 0; r < lines.size(); ++r) {
      fmt::format_to(to, "            rank {}: {}\n", r, lines[r]);
    }
  }
  fmt::format_to(to, "\n");
}

void print_changes(out to, const run_record& run) {
  fmt::format_to(to, "changes between steps\n");
  for (const auto& change : run.changes) {
    const std::string result =
        !change.refusal.empty() ? "not made: " + change.refusal
        : !change.checked       ? "made"
        : change.mismatches == 0
            ? "made; the same rows combined again give the same outputs"
            : fmt::format("made; {} elements differ after it", change.mismatches);
    fmt::format_to(to, "  {:<46} {:>9.3f} ms  {}\n", change.what, change.seconds * 1e3, result);
  }
  fmt::format_to(to, "\n");
}

void print_steps(out to, const run_record& run) {
  fmt::format_to(to, "steps\n  {:>4} {:>7} {:>8} {:>10} {:>10} {:>7}", "step", "tokens", "rows",
                 "DEVICE", "spill", "wrong");
  for (const auto which : k_phases) fmt::format_to(to, " {:>12}", to_string(which));
  fmt::format_to(to, "\n");
  for (const auto& step : run.steps_done) {
    const auto bytes = step.traffic.total();
    fmt::format_to(to, "  {:>4} {:>7} {:>8} {:>10} {:>10} {:>7}", step.step, step.tokens, step.rows,
                   size_text(bytes.device), size_text(bytes.host), step.mismatches);
    for (const double seconds : step.seconds) fmt::format_to(to, " {:>9.3f} ms", seconds * 1e3);
    fmt::format_to(to, "\n");
  }
  fmt::format_to(to, "\n");
}

/// Own and peer memory, DEVICE and HOST_NUMA, of all ranks and steps.
struct path_bytes {
  tier_bytes own;
  tier_bytes peer;
};
path_bytes paths_of(const run_record& run) {
  const traffic_matrix traffic = run.traffic();
  path_bytes made{.own = traffic.own(), .peer = traffic.total()};
  made.peer.device -= made.own.device;
  made.peer.host -= made.own.host;
  return made;
}

void print_paths(out to, const run_record& run) {
  const auto paths = paths_of(run);
  const auto line = [&](const char* name, int times, bool peers) {
    const auto text = [&](std::uint64_t bytes) {
      return size_text(bytes * static_cast<unsigned>(times));
    };
    fmt::format_to(to, "  {:<26} {:>12} {:>12} {:>12} {:>12}\n", name, text(paths.own.device),
                   text(paths.own.host), peers ? text(paths.peer.device) : "-",
                   peers ? text(paths.peer.host) : "-");
  };
  fmt::format_to(to, "bytes by path, all ranks and steps\n  {:<26} {:>12} {:>12} {:>12} {:>12}\n",
                 "", "own DEVICE", "own HOST", "peer DEVICE", "peer HOST");
  line("dispatch (stores)", 1, true);
  line("combine (loads)", 1, true);
  fmt::format_to(to, "\n");
}

void print_rates(out to, const run_record& run) {
  fmt::format_to(to,
                 "phases: median over steps of the slowest rank's time; bandwidth of one rank, "
                 "{} repetition{} a step\n  {:<10} {:>12} {:>14} {:>14}\n",
                 run.repeat, run.repeat == 1 ? "" : "s", "", "time", "logical", "physical");
  for (const auto which : k_phases) {
    const auto rate = run.rate(which);
    const auto text = [](double value) {
      return value > 0 ? fmt::format("{:.2f} GB/s", value * 1e-9) : std::string("-");
    };
    fmt::format_to(to, "  {:<10} {:>9.3f} ms {:>14} {:>14}\n", to_string(which), rate.seconds * 1e3,
                   text(rate.logical), text(rate.physical));
  }
  fmt::format_to(to, "\n");
}

void print_spill(out to, const run_record& run) {
  fmt::format_to(to, "spill: bytes of received rows that lay in HOST_NUMA, by rank\n");
  for (const auto& step : run.steps_done) {
    fmt::format_to(to, "  step {:>3}:", step.step);
    for (int r = 0; r < run.ranks; ++r) {
      fmt::format_to(to, " {:>10}", size_text(step.traffic.into(r).host));
    }
    fmt::format_to(to, "\n");
  }
  fmt::format_to(to, "\n");
}

}  // namespace

std::string size_text(std::uint64_t bytes) {
  constexpr const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  auto value = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (value >= 1024 && unit + 1 < std::size(units)) {
    value /= 1024;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.1f} {}", value, units[unit]);
}

std::string report(const run_record& run) {
  std::string text;
  const out to = std::back_inserter(text);
  print_setting(to, run);
  print_segments(to, run);
  print_changes(to, run);
  print_steps(to, run);
  print_spill(to, run);
  print_paths(to, run);
  print_rates(to, run);
  return text;
}

std::string verdict(const run_record& run) {
  if (run.mismatches() != 0) {
    return fmt::format("FAILED: {} output elements differ from the reference", run.mismatches());
  }
  const auto bytes = run.traffic().total();
  return fmt::format(
      "verified: {} ranks, {} steps, {} tokens, {} rows, {} moved (dispatch and combine), {} "
      "spilled to HOST_NUMA; region {} a rank, {} than the {} {}",
      run.ranks, run.steps_done.size(), run.tokens(), run.rows(), size_text(2 * bytes.total()),
      size_text(bytes.host), size_text(run.most_region_bytes),
      run.larger_than_device() ? "larger" : "no larger", size_text(run.device_limit()),
      run.device_cap != 0 ? "cap on its DEVICE part" : "device");
}

std::string to_json(const run_record& run) {
  using nlohmann::json;
  json made = {
      {"ranks", run.ranks},
      {"driver", run.driver},
      {"routing", run.routing},
      {"rank_lines", run.rank_lines},
      {"hidden", run.hidden},
      {"top_k", run.top_k},
      {"repeat", run.repeat},
      {"row_bytes", run.row_bytes},
      {"expected_rows", run.expected_rows},
      {"worst_rows", run.worst_rows},
      {"device_capacity", run.device_capacity},
      {"device_cap", run.device_cap},
      {"region_bytes", run.most_region_bytes},
      {"larger_than_device", run.larger_than_device()},
      {"tokens", run.tokens()},
      {"rows", run.rows()},
      {"mismatches", run.mismatches()},
  };
  for (const auto& step : run.steps_done) {
    json one = {{"step", step.step},
                {"tokens", step.tokens},
                {"rows", step.rows},
                {"mismatches", step.mismatches},
                {"device_bytes", step.traffic.total().device},
                {"spill_bytes", step.traffic.total().host}};
    for (const auto which : k_phases) {
      const auto rate = step.rate(which);
      one["phases"][to_string(which)] = {{"seconds", rate.seconds},
                                         {"logical_bytes_per_second", rate.logical},
                                         {"physical_bytes_per_second", rate.physical}};
    }
    for (int r = 0; r < run.ranks; ++r) {
      one["spill_by_rank"].push_back(step.traffic.into(r).host);
      json row = json::array();
      for (int to = 0; to < run.ranks; ++to) row.push_back(step.traffic.at(r, to).total());
      one["traffic"].push_back(row);
    }
    made["steps"].push_back(one);
  }
  made["changes"] = json::array();
  for (const auto& change : run.changes) {
    made["changes"].push_back({{"what", change.what},
                               {"refusal", change.refusal},
                               {"seconds", change.seconds},
                               {"checked", change.checked},
                               {"mismatches", change.mismatches}});
  }
  for (const auto& at : run.moments) {
    json one = {{"label", at.label}, {"epoch", at.epoch}, {"used", at.used}};
    for (const auto& segments : at.segments) {
      json parts = json::array();
      for (const auto& part : segments) {
        parts.push_back({{"offset", part.offset},
                         {"bytes", part.bytes},
                         {"where", evmm::to_string(part.where)}});
      }
      one["segments"].push_back(parts);
    }
    made["moments"].push_back(one);
  }
  return made.dump(1);
}

}  // namespace moe
