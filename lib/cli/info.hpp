// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/cli/libraries.hpp"
#include "lib/cli/machine.hpp"
#include "lib/cli/proof.hpp"

#include <nlohmann/json.hpp>

#include <optional>
#include <string>
#include <vector>

namespace evmm::cli {

/// What is here, as `evmm info` reports it.
struct info_report {
  /// A device that another process has for itself does not tell its memory, for one.
  struct memory {
    std::optional<memory_usage> usage = {};
    std::string error = {};  ///< why it is not known
  };
  struct device {
    device_description description;
    memory held = {};
    std::vector<bool> reaches = {};  ///< by device: whether this one loads and stores its memory
    std::optional<placement_choice> placement = {};
    std::string placement_error = {};
  };
  struct node {
    numa_node id;
    memory held = {};
    std::optional<node_description> known = {};  ///< where hwloc has this node
  };

  std::optional<driver_info> driver;
  std::string driver_error;
  bool cuda = false;
  std::string cuda_why_not;
  std::vector<device> devices;
  std::vector<node> nodes;
  std::string cuda_compiled;
  library_versions nccl;
  library_versions mpi;
  std::vector<proof> proofs;
};

info_report collect_info(machine& here);

/// The schema is in README.md; `schema` in it is raised when a key changes its meaning or goes.
nlohmann::ordered_json to_json(const info_report& report);
std::string to_text(const info_report& report);
/// 0, or 1 when there is no driver to work with.
int exit_code(const info_report& report);

}  // namespace evmm::cli
