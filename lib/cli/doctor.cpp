// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/doctor.hpp"

#include "lib/cli/device_checks.hpp"
#include "lib/cli/limit_checks.hpp"
#include "lib/cli/sharing_checks.hpp"

#include <fmt/format.h>

#include <algorithm>

namespace evmm::cli {

namespace {

using nlohmann::ordered_json;

struct check {
  const char* name;
  const char* title;
  finding (*run)(const machine&);
};

/// A check that looks at the process alone.
template <finding (*Run)()>
finding alone(const machine& /*here*/) {
  return Run();
}

constexpr check k_checks[] = {
    {"gpu_driver", "CUDA driver and GPU", check_gpu_driver},
    {"driver_starts", "the driver that programs get", check_driver_starts},
    {"host_memory", "host memory in the address range", check_host_memory},
    {"peers", "access between devices", check_peers},
    {"fabric", "sharing over the NVLink fabric", check_fabric},
    {"iommu", "IOMMU of the GPUs", check_iommu},
    {"wsl", "Windows Subsystem for Linux", check_wsl},
    {"nccl", "NCCL", check_nccl},
    {"locality", "NUMA node of each device", check_locality},
    {"allowed_nodes", "NUMA nodes that may be used", check_allowed_nodes},
    {"allocator_options", "options of caching allocators", alone<check_allocator_options>},
    {"timeout", "deadline of steps between ranks", alone<check_timeout>},
    {"memory_limit", "memory limit of the control group", alone<check_memory_limit>},
    {"open_files", "open files (RLIMIT_NOFILE)", alone<check_open_files>},
    {"locked_memory", "locked memory (RLIMIT_MEMLOCK)", alone<check_locked_memory>},
    {"address_space", "addresses (RLIMIT_AS)", alone<check_address_space>},
    {"map_count", "mappings of a process", alone<check_map_count>},
    {"overcommit", "memory overcommit", alone<check_overcommit>},
    {"huge_pages", "huge pages", alone<check_huge_pages>},
    {"shared_memory", "/dev/shm", alone<check_shared_memory>},
    {"memfd", "anonymous files (memfd_create)", alone<check_memfd>},
    {"memory_policy", "memory policy (mbind)", alone<check_memory_policy>},
    {"descriptor_passing", "passing descriptors over sockets", alone<check_descriptor_passing>},
    {"pidfd", "fetching descriptors (pidfd_getfd)", alone<check_pidfd>},
    {"ptrace_scope", "ptrace scope (Yama)", alone<check_ptrace_scope>},
    {"sandbox", "seccomp and no_new_privs", alone<check_sandbox>},
};

ordered_json or_null(const std::string& text) {
  return text.empty() ? ordered_json(nullptr) : ordered_json(text);
}

status worst(const std::vector<diagnosis>& all) {
  status found = status::ok;
  for (const auto& each : all) found = std::max(found, each.result.level);
  return found;
}

}  // namespace

const char* to_string(status level) {
  switch (level) {
    case status::ok:
      return "ok";
    case status::warn:
      return "warn";
    case status::fail:
      break;
  }
  return "fail";
}

std::vector<diagnosis> run_doctor(const machine& here) {
  std::vector<diagnosis> all;
  for (const check& each : k_checks) {
    diagnosis entry{.check = each.name, .title = each.title, .result = {}};
    const std::string failure = failure_of([&] { entry.result = each.run(here); });
    if (!failure.empty()) {
      entry.result = {.level = status::warn,
                      .found = "could not be checked: " + failure,
                      .meaning = "the message says what stood in the way"};
    }
    all.push_back(std::move(entry));
  }
  return all;
}

ordered_json to_json(const std::vector<diagnosis>& all) {
  ordered_json json = {{"schema", 1}, {"status", to_string(worst(all))}};
  json["findings"] = ordered_json::array();
  for (const auto& each : all) {
    json["findings"].push_back({{"check", each.check},
                                {"status", to_string(each.result.level)},
                                {"title", each.title},
                                {"found", each.result.found},
                                {"meaning", or_null(each.result.meaning)},
                                {"remedy", or_null(each.result.remedy)}});
  }
  return json;
}

std::string to_text(const std::vector<diagnosis>& all) {
  std::string text;
  std::size_t counts[3] = {};
  for (const auto& each : all) {
    const finding& result = each.result;
    ++counts[static_cast<std::size_t>(result.level)];
    text += fmt::format("{:<5} {:<36} {}\n", to_string(result.level), each.title, result.found);
    if (result.level == status::ok) continue;
    if (!result.meaning.empty()) text += fmt::format("      means: {}\n", result.meaning);
    if (!result.remedy.empty()) text += fmt::format("      remedy: {}\n", result.remedy);
  }
  text += fmt::format("\n{} ok, {} to note, {} that would stop a job\n", counts[0], counts[1],
                      counts[2]);
  return text;
}

int exit_code(const std::vector<diagnosis>& all) {
  return worst(all) == status::fail ? 1 : 0;
}

}  // namespace evmm::cli
