// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/cli/finding.hpp"
#include "lib/cli/libraries.hpp"
#include "lib/cli/machine.hpp"

#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace evmm::cli {

// GPUs, what lies between them, and the libraries that use them.

/// `gpus` is how many NVIDIA GPUs the PCI bus shows.
finding judge_gpu_driver(bool cuda, const std::string& why_not, int gpus);
finding judge_fabric(bool proved, bool channel_files);
/// Peer access as one row for each device.
finding judge_peers(const std::vector<std::vector<bool>>& reaches);
/// Devices whose node is not known to hwloc, on a machine with so many nodes.
finding judge_locality(const std::vector<int>& unknown, std::size_t nodes);
/// Nodes with memory that the process may not use.
finding judge_allowed_nodes(const std::vector<node_description>& nodes);
finding judge_wsl(bool wsl);
/// Types of the IOMMU groups of the GPUs: "DMA", "DMA-FQ", "identity"; empty when there are none.
finding judge_iommu(const std::vector<std::string>& group_types);
finding judge_nccl(const library_versions& nccl, bool cuda);

finding check_gpu_driver(const machine& here);
finding check_driver_starts(const machine& here);
finding check_host_memory(const machine& here);
finding check_fabric(const machine& here);
finding check_peers(const machine& here);
finding check_locality(const machine& here);
finding check_allowed_nodes(const machine& here);
finding check_wsl(const machine& here);
finding check_iommu(const machine& here);
finding check_nccl(const machine& here);

}  // namespace evmm::cli
