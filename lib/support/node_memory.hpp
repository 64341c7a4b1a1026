// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Where Linux describes its NUMA nodes.
inline constexpr std::string_view k_sysfs_nodes = "/sys/devices/system/node";

/// The numbers in a kernel list such as "0,2-4\n"; empty when it is not one.
std::vector<int> parse_kernel_list(std::string_view text);

/// Nodes that have memory, ascending; node 0 alone where sysfs does not say.
std::vector<numa_node> nodes_with_memory(const std::string& sysfs = std::string(k_sysfs_nodes));

/// Whether sysfs told, or node 0 was made up.
bool sysfs_lists_nodes(const std::string& sysfs = std::string(k_sysfs_nodes));

/// Total memory of a node, and what is free or clean page cache, which the kernel gives up when
/// asked. nullopt when there is no such node. `text` is a nodeN/meminfo.
std::optional<memory_usage> parse_node_meminfo(std::string_view text);
std::optional<memory_usage> node_memory(numa_node node,
                                        const std::string& sysfs = std::string(k_sysfs_nodes));

}  // namespace evmm
