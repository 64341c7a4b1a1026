// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// One NUMA node as hwloc sees it.
struct node_description {
  numa_node node;
  std::size_t bytes = 0;  ///< local memory
  int processors = 0;     ///< those whose own node it is; 0 for a memory-only node
  bool allowed = true;    ///< this process may take memory there (cpuset, cgroup)
};

/// Where to put the host tier.
struct host_placement {
  enum class policy {
    nearest,  ///< the first node near the device that really serves a creation; `nodes` is empty
    bind,     ///< the first of `nodes` that serves one, and no other node
    /// Successive segments on successive nodes: those of `nodes` (one named twice takes twice the
    /// share), or all allowed nodes, nearest first. Nodes that do not serve are left out.
    interleave,
  };
  policy how = policy::nearest;
  std::vector<numa_node> nodes = {};
  friend bool operator==(const host_placement&, const host_placement&) = default;
};

/// One node that was considered, why, and what became of it.
struct node_candidate {
  numa_node node;
  std::string reason;        ///< "hwloc: local to PCI 0000:1b:00.0", "allowed node at distance 21"
  bool proved = false;       ///< a real creation succeeded
  std::string refusal = {};  ///< why the creation failed, when it was tried and did
};

/// The nodes chosen for one device's host tier, and the whole story.
struct placement_choice {
  std::vector<numa_node> nodes;  ///< used in turn; never empty
  std::vector<node_candidate> considered;
  /// One line: "HOST_NUMA 1 for DEVICE 0: hwloc: local to PCI 0000:1b:00.0 (proved)".
  std::string text;
};

/// CPUs, NUMA nodes and PCI locality of a machine, through hwloc.
///
/// Units: bytes. Threads: immutable after construction; any thread. Streams: none.
/// Errors: loading throws driver_error with errno, or invalid_argument naming the file.
class topology {
 public:
  /// This machine, restricted to what the process may use.
  static topology load();
  /// A recorded machine (`lstopo file.xml`), for tests and for planning.
  static topology from_xml(const std::string& path);

  topology(topology&&) noexcept;
  topology& operator=(topology&&) noexcept;
  ~topology();

  /// Nodes with memory, ascending.
  std::vector<node_description> nodes() const;
  /// hwloc's latency matrix, relative to 10 for a node and itself; nullopt where unknown.
  std::optional<int> distance(numa_node from, numa_node to) const;
  /// Nodes local to a PCI device, ascending; empty when unknown. That is common in virtual
  /// machines, also those of one node: the device then hangs off the machine as a whole.
  std::vector<numa_node> local_nodes(const std::string& pci_bus_id) const;

  /// Candidates for a device's host tier, best first: hwloc's locality (the driver's hint first
  /// where several nodes are equally local), the hint, then allowed nodes by distance, those with
  /// processors before memory-only ones at the same distance. Each node once; none that the process
  /// may not use. Nothing is proved yet.
  std::vector<node_candidate> candidates(const device_description& device) const;

 private:
  struct state;
  explicit topology(std::unique_ptr<state> loaded);
  std::unique_ptr<state> state_;
};

/// Chooses the nodes for a device's host tier: candidates are proved in order, each by creating one
/// granule on it. Nodes that the driver offers and hwloc does not know come last, and may be named
/// too. The choice is logged at level info.
/// Throws invalid_argument when the placement names a node that does not exist or is not allowed
/// (the message lists those that are), unsupported when no candidate serves, or out_of_memory when
/// one would and is full (the message lists each and its refusal).
placement_choice choose_nodes(driver& on, const topology& machine, device_id device,
                              const host_placement& placement = {});

}  // namespace evmm
