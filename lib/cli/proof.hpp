// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <string>
#include <vector>

namespace evmm::cli {

/// One thing that was tried on one location, for what attributes promise is not always kept.
struct proof {
  std::string what;   ///< "create", "map", "access", "touch", "cpu", "export_fd", ...
  std::string where;  ///< "DEVICE 0"
  bool tried = false;
  bool worked = false;
  std::string detail = {};  ///< why it did not
};

/// Tries, with one granule at `where`: create; map; access by `accessor` (and by the CPUs for host
/// memory); touch, filling and copying back; cpu, loads and stores by this process; export_fd and
/// import_fd, where the import is mapped at a second address and shows the same bytes; fabric,
/// created, exported and imported. What needs a step that failed is not tried.
std::vector<proof> prove(driver& on, memory_location where, device_id accessor);

/// prove() on each device, and on each NUMA node for the first device that maps host memory.
std::vector<proof> prove_all(driver& on);

}  // namespace evmm::cli
