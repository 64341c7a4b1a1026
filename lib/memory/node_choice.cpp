// SPDX-License-Identifier: Apache-2.0
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/topology.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

namespace evmm {

namespace {

std::string name_of(numa_node node) {
  return to_string(memory_location::on(node));
}

/// Creates and releases one granule. What a node's number, its memory or its cpuset promise shows
/// only here. False when the node would serve and is full.
bool prove(driver& on, node_candidate& candidate) {
  try {
    const auto where = memory_location::on(candidate.node);
    const physical_memory granule(
        on, {.bytes = on.granularity(where),
             .where = where,
             .share = on.info().fd_sharing ? share_kind::fd : share_kind::none});
    candidate.proved = true;
  } catch (const error& refusal) {
    candidate.refusal = refusal.what();
    return refusal.category() != error_category::out_of_memory;
  }
  return true;
}

bool holds(const std::vector<numa_node>& nodes, numa_node node) {
  return std::find(nodes.begin(), nodes.end(), node) != nodes.end();
}

/// What hwloc knows and what the driver offers, for someone who named another node.
std::string list_nodes(const topology& machine, const std::vector<numa_node>& offered) {
  std::string text;
  for (const auto& known : machine.nodes()) {
    text += fmt::format("{}{} ({}{}{})", text.empty() ? "" : ", ", known.node.value,
                        format_bytes(known.bytes), known.processors == 0 ? ", memory only" : "",
                        known.allowed ? "" : ", not allowed for this process");
  }
  std::string drivers;
  for (const auto node : offered) {
    drivers += fmt::format("{}{}", drivers.empty() ? "" : ", ", node.value);
  }
  return fmt::format("hwloc knows {}; the driver offers {}", text.empty() ? "none" : text,
                     drivers.empty() ? "none" : drivers);
}

/// The nodes that the caller named, each checked to exist and to be allowed.
std::vector<node_candidate> listed(const topology& machine, const std::vector<numa_node>& offered,
                                   const host_placement& placement) {
  const auto nodes = machine.nodes();
  std::vector<node_candidate> found;
  for (const auto node : placement.nodes) {
    const auto known = std::find_if(nodes.begin(), nodes.end(),
                                    [&](const auto& other) { return other.node == node; });
    const bool allowed = known != nodes.end() ? known->allowed : holds(offered, node);
    if (!allowed) {
      throw invalid_argument(
          fmt::format("{} {}; {}", name_of(node),
                      known == nodes.end() ? "does not exist" : "is not allowed for this process",
                      list_nodes(machine, offered)),
          "name nodes that exist and that the process's cpuset allows");
    }
    found.push_back({.node = node, .reason = "asked for"});
  }
  return found;
}

/// hwloc's candidates, then what only the driver knows: it may emulate nodes, or see through a
/// container that hwloc does not.
std::vector<node_candidate> every(const topology& machine, const std::vector<numa_node>& offered,
                                  const device_description& device) {
  auto found = machine.candidates(device);
  const auto nodes = machine.nodes();
  for (const auto node : offered) {
    const bool known =
        std::any_of(nodes.begin(), nodes.end(), [&](const auto& n) { return n.node == node; }) ||
        std::any_of(found.begin(), found.end(), [&](const auto& c) { return c.node == node; });
    if (!known) {
      found.push_back({.node = node, .reason = "offered by the driver, unknown to hwloc"});
    }
  }
  return found;
}

/// "HOST_NUMA 0 for DEVICE 0: hwloc: local to PCI ... (proved)", or
/// "HOST_NUMA 0, 1 for DEVICE 0, interleaved; 0: ... (proved); 1: ... (proved)"; then the refusals.
std::string report(const placement_choice& choice, device_id device, bool interleaved) {
  std::string places, reasons, refusals;
  for (const auto node : choice.nodes) {
    places += fmt::format("{}{}", places.empty() ? "HOST_NUMA " : ", ", node.value);
  }
  for (const auto& candidate : choice.considered) {
    if (candidate.proved) {
      if (interleaved) reasons += fmt::format("; {}: ", candidate.node.value);
      reasons += candidate.reason + " (proved)";
    } else if (!candidate.refusal.empty()) {
      refusals += fmt::format("; not {} ({}): {}", name_of(candidate.node), candidate.reason,
                              candidate.refusal);
    }
  }
  return fmt::format("{} for {}{}{}{}", places, to_string(memory_location::on(device)),
                     interleaved ? ", interleaved" : ": ", reasons, refusals);
}

[[noreturn]] void refuse(const std::vector<node_candidate>& considered, device_id device,
                         bool full) {
  std::string refusals;
  for (const auto& candidate : considered) {
    refusals += fmt::format("{}{} ({}): {}", refusals.empty() ? "" : "; ", name_of(candidate.node),
                            candidate.reason, candidate.refusal);
  }
  throw_error(
      full ? error_category::out_of_memory : error_category::unsupported,
      {fmt::format("no NUMA node serves the host tier of {}: {}",
                   to_string(memory_location::on(device)),
                   refusals.empty() ? "there is no candidate" : refusals),
       "free memory on a node, widen the process's cpuset, or name nodes in host_placement"});
}

}  // namespace

placement_choice choose_nodes(driver& on, const topology& machine, device_id device,
                              const host_placement& placement) {
  using policy = host_placement::policy;
  if (placement.how == policy::nearest && !placement.nodes.empty()) {
    throw invalid_argument("the placement is 'nearest', yet it lists nodes",
                           "use 'bind' or 'interleave', or list none");
  }
  if (placement.how == policy::bind && placement.nodes.empty()) {
    throw invalid_argument("the placement is 'bind', yet it lists no nodes", "list at least one");
  }
  const auto offered = on.numa_nodes();
  const bool interleaved = placement.how == policy::interleave;
  placement_choice choice;
  choice.considered = placement.nodes.empty() ? every(machine, offered, on.describe(device))
                                              : listed(machine, offered, placement);
  bool full = false;
  for (auto& candidate : choice.considered) {
    full = !prove(on, candidate) || full;
    if (!candidate.proved) continue;
    choice.nodes.push_back(candidate.node);
    if (!interleaved) break;
  }
  if (choice.nodes.empty()) refuse(choice.considered, device, full);
  choice.text = report(choice, device, interleaved);
  log().info("{}", choice.text);
  return choice;
}

}  // namespace evmm
