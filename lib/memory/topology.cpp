// SPDX-License-Identifier: Apache-2.0
#include <evmm/error.hpp>
#include <evmm/topology.hpp>

#include <climits>
#include <fmt/format.h>
#include <hwloc.h>

#include <algorithm>
#include <cerrno>
#include <system_error>
#include <utility>

namespace evmm {

struct topology::state {
  hwloc_topology_t machine = nullptr;
  std::vector<node_description> nodes;  ///< ascending
  std::vector<int> distances;           ///< nodes.size() squared, row by row; 0 where unknown

  state() = default;
  state(const state&) = delete;
  state& operator=(const state&) = delete;
  ~state() {
    if (machine != nullptr) hwloc_topology_destroy(machine);
  }

  const node_description* find(numa_node node) const {
    const auto at = std::find_if(nodes.begin(), nodes.end(),
                                 [&](const node_description& known) { return known.node == node; });
    return at == nodes.end() ? nullptr : &*at;
  }

  void read_nodes();
  void read_distances();
};

namespace {

std::string hwloc_failure(const std::string& step, int code) {
  return fmt::format("hwloc could not read {}: {}", step, std::system_category().message(code));
}

/// Configures and loads. The default filter drops PCI devices. OS devices stay out: they add
/// nothing here, and looking for them would start CUDA or OpenCL inside hwloc's plug-ins.
bool load_machine(hwloc_topology_t machine) {
  return hwloc_topology_set_type_filter(machine, HWLOC_OBJ_PCI_DEVICE,
                                        HWLOC_TYPE_FILTER_KEEP_IMPORTANT) == 0 &&
         hwloc_topology_set_flags(machine, HWLOC_TOPOLOGY_FLAG_INCLUDE_DISALLOWED) == 0 &&
         hwloc_topology_load(machine) == 0;
}

hwloc_obj_t node_object(hwloc_topology_t machine, numa_node node) {
  return hwloc_get_numanode_obj_by_os_index(machine, static_cast<unsigned>(node.value));
}

/// The lowest node number among an object's memory children, which may sit below memory-side
/// caches; -1 without any.
int lowest_node(hwloc_obj_t object) {
  if (object->type == HWLOC_OBJ_NUMANODE) return static_cast<int>(object->os_index);
  int lowest = -1;
  for (auto* child = object->memory_first_child; child != nullptr; child = child->next_sibling) {
    const int node = lowest_node(child);
    if (node >= 0 && (lowest < 0 || node < lowest)) lowest = node;
  }
  return lowest;
}

/// The node that a processor calls its own: the innermost one around it. hwloc gives a memory-only
/// node the cpuset of what it is attached to, so cpusets cannot tell; and where several nodes are
/// attached to one object (DRAM beside HBM), the operating system numbers the one with processors
/// first.
int home_node(hwloc_obj_t processor) {
  for (auto* around = processor->parent; around != nullptr; around = around->parent) {
    if (around->memory_arity > 0) return lowest_node(around);
  }
  return -1;
}

std::vector<node_description> read_nodes_of(hwloc_topology_t machine) {
  std::vector<node_description> nodes;
  hwloc_obj_t object = nullptr;
  while ((object = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_NUMANODE, object)) != nullptr) {
    if (object->attr->numanode.local_memory == 0) continue;
    nodes.push_back({
        .node = numa_node{static_cast<int>(object->os_index)},
        .bytes = static_cast<std::size_t>(object->attr->numanode.local_memory),
        .allowed =
            hwloc_bitmap_isset(hwloc_topology_get_allowed_nodeset(machine), object->os_index) != 0,
    });
  }
  return nodes;
}

}  // namespace

void topology::state::read_nodes() {
  nodes = read_nodes_of(machine);
  std::sort(nodes.begin(), nodes.end(),
            [](const auto& left, const auto& right) { return left.node < right.node; });
  hwloc_obj_t processor = nullptr;
  while ((processor = hwloc_get_next_obj_by_type(machine, HWLOC_OBJ_PU, processor)) != nullptr) {
    const int home = home_node(processor);
    for (auto& known : nodes) known.processors += known.node.value == home ? 1 : 0;
  }
}

// Read once: hwloc refreshes its distances inside the getter, which other threads must not see.
void topology::state::read_distances() {
  const std::size_t count = nodes.size();
  distances.assign(count * count, 0);
  unsigned found = 1;
  hwloc_distances_s* matrix = nullptr;
  if (hwloc_distances_get_by_type(machine, HWLOC_OBJ_NUMANODE, &found, &matrix,
                                  HWLOC_DISTANCES_KIND_MEANS_LATENCY, 0) == 0 &&
      found > 0) {
    for (std::size_t from = 0; from < count; ++from) {
      const int row = hwloc_distances_obj_index(matrix, node_object(machine, nodes[from].node));
      for (std::size_t to = 0; row >= 0 && to < count; ++to) {
        const int column = hwloc_distances_obj_index(matrix, node_object(machine, nodes[to].node));
        if (column < 0) continue;
        const auto at = [&](int r, int c) {
          return matrix
              ->values[static_cast<unsigned>(r) * matrix->nbobjs + static_cast<unsigned>(c)];
        };
        // The operating system's matrix has 10 on the diagonal; a measured one may not.
        const auto self = std::max<hwloc_uint64_t>(at(row, row), 1);
        distances[from * count + to] =
            static_cast<int>(std::min<hwloc_uint64_t>(at(row, column) * 10 / self, INT_MAX));
      }
    }
    hwloc_distances_release(machine, matrix);
  }
  for (std::size_t self = 0; self < count; ++self) distances[self * count + self] = 10;
}

topology::topology(std::unique_ptr<state> loaded) : state_(std::move(loaded)) {
  state_->read_nodes();
  state_->read_distances();
}

topology::topology(topology&&) noexcept = default;
topology& topology::operator=(topology&&) noexcept = default;
topology::~topology() = default;

topology topology::load() {
  auto loading = std::make_unique<state>();
  const bool started = hwloc_topology_init(&loading->machine) == 0;
  // hwloc reads PCI devices from sysfs by itself; its libpciaccess plug-in, where there is one,
  // leaks at each load. It is no failure if there is none to leave out.
  if (started) {
    (void)hwloc_topology_set_components(loading->machine, HWLOC_TOPOLOGY_COMPONENTS_FLAG_BLACKLIST,
                                        "pci");
  }
  if (!started || !load_machine(loading->machine)) {
    const int code = errno;
    throw driver_error(hwloc_failure("this machine's topology", code), {}, code);
  }
  return topology(std::move(loading));
}

topology topology::from_xml(const std::string& path) {
  auto loading = std::make_unique<state>();
  if (hwloc_topology_init(&loading->machine) != 0 ||
      hwloc_topology_set_xml(loading->machine, path.c_str()) != 0 ||
      !load_machine(loading->machine)) {
    const int code = errno;
    throw invalid_argument(hwloc_failure(fmt::format("'{}'", path), code),
                           "write it with `lstopo --disallowed file.xml`", code);
  }
  return topology(std::move(loading));
}

std::vector<node_description> topology::nodes() const {
  return state_->nodes;
}

std::optional<int> topology::distance(numa_node from, numa_node to) const {
  const auto* row = state_->find(from);
  const auto* column = state_->find(to);
  if (row == nullptr || column == nullptr) return std::nullopt;
  const auto& nodes = state_->nodes;
  const auto index = static_cast<std::size_t>(row - nodes.data()) * nodes.size() +
                     static_cast<std::size_t>(column - nodes.data());
  const int value = state_->distances[index];
  return value == 0 ? std::nullopt : std::optional(value);
}

std::vector<numa_node> topology::local_nodes(const std::string& pci_bus_id) const {
  hwloc_obj_t near = hwloc_get_pcidev_by_busidstring(state_->machine, pci_bus_id.c_str());
  if (near != nullptr) near = hwloc_get_non_io_ancestor_obj(state_->machine, near);
  if (near == nullptr || near->parent == nullptr) return {};  // not here, or anywhere in here
  // An object's nodeset also holds nodes attached above it, such as a memory-only node that
  // belongs to the whole machine; what is local lies inside. Where nothing does, the object is
  // smaller than a node (a cache), and the next one around it is asked.
  std::vector<numa_node> local;
  for (; near != nullptr && local.empty(); near = near->parent) {
    for (const auto& known : state_->nodes) {
      const auto* object = node_object(state_->machine, known.node);
      if (hwloc_bitmap_isincluded(object->cpuset, near->cpuset)) local.push_back(known.node);
    }
  }
  return local;
}

std::vector<node_candidate> topology::candidates(const device_description& device) const {
  std::vector<node_candidate> found;
  const auto propose = [&](numa_node node, std::string reason) {
    const auto* known = state_->find(node);
    if (known != nullptr && !known->allowed) return;
    if (std::any_of(found.begin(), found.end(),
                    [&](const node_candidate& other) { return other.node == node; })) {
      return;
    }
    if (known != nullptr && known->processors == 0) reason += ", memory only";
    found.push_back({.node = node, .reason = std::move(reason)});
  };
  const auto memory_only = [&](numa_node node) { return state_->find(node)->processors == 0; };

  // Several nodes may be equally local: then the driver's hint is believed, and among the rest
  // those with processors come first.
  auto local = local_nodes(device.pci_bus_id);
  const auto local_rank = [&](numa_node node) {
    return node == device.host_node ? 0 : memory_only(node) ? 2 : 1;
  };
  std::stable_sort(local.begin(), local.end(), [&](numa_node left, numa_node right) {
    return local_rank(left) < local_rank(right);
  });
  for (const auto node : local) {
    propose(node, fmt::format("hwloc: local to PCI {}", device.pci_bus_id));
  }
  // A hint that hwloc does not know may still be right (a driver that emulates nodes).
  if (device.host_node && device.host_node->value >= 0) {
    propose(*device.host_node, "the driver's hint");
  }

  // The rest, by distance from the best place known even if this process may not use it.
  std::optional<numa_node> nearest;
  if (!local.empty()) {
    nearest = local.front();
  } else if (device.host_node && state_->find(*device.host_node) != nullptr) {
    nearest = device.host_node;
  }
  const auto far = [&](numa_node node) {
    return nearest ? distance(*nearest, node).value_or(INT_MAX) : INT_MAX;
  };
  auto rest = state_->nodes;
  std::stable_sort(rest.begin(), rest.end(), [&](const auto& left, const auto& right) {
    return std::pair(far(left.node), left.processors == 0) <
           std::pair(far(right.node), right.processors == 0);
  });
  for (const auto& known : rest) {
    std::string reason = "allowed node";
    if (!nearest) {
      reason += ", nothing says which is near";
    } else {
      const int away = far(known.node);
      reason += away == INT_MAX ? " at an unknown distance" : fmt::format(" at distance {}", away);
      reason += fmt::format(" from {}", to_string(memory_location::on(*nearest)));
      if (!state_->find(*nearest)->allowed) reason += " (near, but not allowed)";
    }
    propose(known.node, std::move(reason));
  }
  return found;
}

}  // namespace evmm
