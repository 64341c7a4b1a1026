// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <string>
#include <vector>

namespace evmm {

/// Who holds memory of the device, as NVML tells; empty where there is no NVML, or it does not
/// tell. Loads libnvidia-ml at the first call, and never unloads it.
std::vector<process_usage> processes_on(const std::string& pci_bus_id);

}  // namespace evmm
