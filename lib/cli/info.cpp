// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/info.hpp"

#include "lib/support/format.hpp"

#include <evmm/version.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace evmm::cli {

namespace {

using nlohmann::ordered_json;

/// Empty text is null: a key is always there.
ordered_json or_null(const std::string& text) {
  return text.empty() ? ordered_json(nullptr) : ordered_json(text);
}

template <class Tag>
ordered_json or_null(const std::optional<strong_id<Tag>>& id) {
  return id ? ordered_json(id->value) : ordered_json(nullptr);
}

ordered_json or_null(const info_report::memory& held, std::size_t memory_usage::*part) {
  return held.usage ? ordered_json(*held.usage.*part) : ordered_json(nullptr);
}

ordered_json json_of(const library_versions& library) {
  return {{"compiled", or_null(library.compiled)},
          {"found", or_null(library.found)},
          {"path", or_null(library.path)},
          {"why_not", or_null(library.why_not)}};
}

ordered_json json_of(const info_report::device& device) {
  const auto& told = device.description;
  ordered_json placement = {{"nodes", ordered_json::array()},
                            {"text", nullptr},
                            {"error", or_null(device.placement_error)},
                            {"considered", ordered_json::array()}};
  if (device.placement) {
    for (const numa_node node : device.placement->nodes) placement["nodes"].push_back(node.value);
    placement["text"] = device.placement->text;
    for (const auto& each : device.placement->considered) {
      placement["considered"].push_back({{"node", each.node.value},
                                         {"reason", each.reason},
                                         {"proved", each.proved},
                                         {"refusal", or_null(each.refusal)}});
    }
  }
  return {{"id", told.id.value},
          {"name", told.name},
          {"pci_bus_id", or_null(told.pci_bus_id)},
          {"total_bytes", told.total_bytes},
          {"free_bytes", or_null(device.held, &memory_usage::free_bytes)},
          {"memory_error", or_null(device.held.error)},
          {"multiprocessors", told.multiprocessors},
          {"rdma_capable", told.rdma_capable},
          {"host_memory", told.host_memory},
          {"host_node_hint", or_null(told.host_node)},
          {"reaches", device.reaches},
          {"placement", placement}};
}

ordered_json json_of(const info_report::node& node) {
  return {{"id", node.id.value},
          {"total_bytes", or_null(node.held, &memory_usage::total_bytes)},
          {"free_bytes", or_null(node.held, &memory_usage::free_bytes)},
          {"memory_error", or_null(node.held.error)},
          {"processors", node.known ? ordered_json(node.known->processors) : ordered_json(nullptr)},
          {"allowed", node.known ? ordered_json(node.known->allowed) : ordered_json(nullptr)}};
}

std::string text_of(const library_versions& library) {
  return fmt::format("built with {}, {}", library.compiled.empty() ? "none" : library.compiled,
                     library.found.empty() ? "none here (" + library.why_not + ")"
                                           : "here " + library.found + " (" + library.path + ")");
}

std::string text_of(const info_report::memory& held) {
  if (!held.usage) return "not told: " + held.error;
  return fmt::format("{} of {} free", format_bytes(held.usage->free_bytes),
                     format_bytes(held.usage->total_bytes));
}

info_report::memory ask_memory(driver& on, memory_location where) {
  info_report::memory found;
  found.error = failure_of([&] { found.usage = on.usage(where); });
  return found;
}

void add_device(std::string& text, const info_report::device& device) {
  const auto& told = device.description;
  text += fmt::format("\nDEVICE {}: {}\n", told.id.value, told.name);
  if (!told.pci_bus_id.empty()) text += fmt::format("  PCI        {}\n", told.pci_bus_id);
  text += fmt::format("  memory     {}\n", text_of(device.held));
  if (told.multiprocessors != 0) text += fmt::format("  SMs        {}\n", told.multiprocessors);
  std::string peers;
  for (std::size_t i = 0; i < device.reaches.size(); ++i) {
    peers += fmt::format("{}{}", i == 0 ? "" : " ", device.reaches[i] ? std::to_string(i) : "-");
  }
  text += fmt::format("  reaches    {}\n", peers);
  text += fmt::format("  RDMA       {}\n", told.rdma_capable ? "yes" : "no");
  text += fmt::format("  host tier  {}\n", device.placement ? device.placement->text
                                                            : "none: " + device.placement_error);
}

/// Proofs of one location on one line: "create map access touch", and what did not work below.
void add_proofs(std::string& text, const std::vector<proof>& proofs) {
  text += "\nproved by trying\n";
  for (auto first = proofs.begin(); first != proofs.end();) {
    const auto last = std::find_if(first, proofs.end(),
                                   [&](const proof& each) { return each.where != first->where; });
    std::string worked;
    std::string refused;
    for (auto each = first; each != last; ++each) {
      if (each->worked) worked += " " + each->what;
      if (each->tried && !each->worked) {
        refused += fmt::format("    not {}: {}\n", each->what, each->detail);
      }
    }
    text += fmt::format("  {:<12}{}\n{}", first->where, worked, refused);
    first = last;
  }
}

}  // namespace

info_report collect_info(machine& here) {
  info_report report;
  report.driver_error = here.driver_error;
  report.cuda = here.cuda;
  report.cuda_why_not = here.cuda_why_not;
  report.cuda_compiled = cuda_compiled();
  report.nccl = look_for_nccl();
  report.mpi = look_for_mpi();
  if (here.on == nullptr) return report;

  driver& on = *here.on;
  report.driver = on.info();
  for (device_description& told : here.devices()) {
    info_report::device device{.description = std::move(told)};
    const device_id id = device.description.id;
    device.held = ask_memory(on, memory_location::on(id));
    for (int peer = 0; peer < on.device_count(); ++peer) {
      device.reaches.push_back(on.can_access(id, device_id{peer}));
    }
    device.placement_error = here.topology_error;
    if (here.map) {
      device.placement_error =
          failure_of([&] { device.placement = choose_nodes(on, *here.map, id); });
    }
    report.devices.push_back(std::move(device));
  }

  const auto known = here.map ? here.map->nodes() : std::vector<node_description>{};
  for (const numa_node id : on.numa_nodes()) {
    info_report::node node{.id = id, .held = ask_memory(on, memory_location::on(id))};
    const auto same = std::find_if(known.begin(), known.end(),
                                   [&](const node_description& each) { return each.node == id; });
    if (same != known.end()) node.known = *same;
    report.nodes.push_back(std::move(node));
  }
  report.proofs = prove_all(on);
  return report;
}

ordered_json to_json(const info_report& report) {
  ordered_json json = {
      {"schema", 1},
      {"evmm",
       {{"version", EVMM_VERSION},
        {"compiled",
         {{"cuda", or_null(report.cuda_compiled)},
          {"nccl", or_null(report.nccl.compiled)},
          {"mpi", or_null(report.mpi.compiled)}}}}},
      {"driver", nullptr},
      {"driver_error", or_null(report.driver_error)},
      {"cuda", {{"available", report.cuda}, {"why_not", or_null(report.cuda_why_not)}}},
      {"devices", ordered_json::array()},
      {"nodes", ordered_json::array()},
      {"libraries", {{"nccl", json_of(report.nccl)}, {"mpi", json_of(report.mpi)}}},
      {"proofs", ordered_json::array()}};
  if (report.driver) {
    json["driver"] = {{"kind", report.driver->kind == driver_kind::cuda ? "cuda" : "host"},
                      {"version", report.driver->version},
                      {"fd_sharing", report.driver->fd_sharing},
                      {"fabric_sharing", report.driver->fabric_sharing}};
  }
  for (const auto& device : report.devices) json["devices"].push_back(json_of(device));
  for (const auto& node : report.nodes) json["nodes"].push_back(json_of(node));
  for (const proof& each : report.proofs) {
    json["proofs"].push_back({{"what", each.what},
                              {"where", each.where},
                              {"tried", each.tried},
                              {"worked", each.worked},
                              {"detail", or_null(each.detail)}});
  }
  return json;
}

std::string to_text(const info_report& report) {
  std::string text = fmt::format("evmm {}\n", EVMM_VERSION);
  if (report.driver) {
    text += fmt::format("driver     {} {}; shares by descriptor: {}; over the fabric: {}\n",
                        report.driver->name, report.driver->version,
                        report.driver->fd_sharing ? "yes" : "no",
                        report.driver->fabric_sharing ? "yes" : "no");
  } else {
    text += fmt::format("driver     none: {}\n", report.driver_error);
  }
  text += fmt::format(
      "CUDA       built with {}, {}\n",
      report.cuda_compiled.empty() ? "none" : report.cuda_compiled,
      report.cuda ? "available here" : "not available here (" + report.cuda_why_not + ")");
  text += fmt::format("NCCL       {}\n", text_of(report.nccl));
  text += fmt::format("MPI        {}\n", text_of(report.mpi));
  for (const auto& device : report.devices) add_device(text, device);
  if (!report.nodes.empty()) text += "\nhost memory\n";
  for (const auto& node : report.nodes) {
    text += fmt::format("  HOST_NUMA {}  {}", node.id.value, text_of(node.held));
    if (node.known) text += fmt::format(", {} processors", node.known->processors);
    text += node.known && !node.known->allowed ? ", not allowed to this process\n" : "\n";
  }
  if (!report.proofs.empty()) add_proofs(text, report.proofs);
  return text;
}

int exit_code(const info_report& report) {
  return report.driver ? 0 : 1;
}

}  // namespace evmm::cli
