// SPDX-License-Identifier: Apache-2.0
#include "lib/cli/machine.hpp"

namespace evmm::cli {

machine look_at_machine() {
  machine found;
  found.cuda = cuda_available(&found.cuda_why_not);
  found.driver_error = failure_of([&] { found.on = make_driver(); });
  found.topology_error = failure_of([&] { found.map.emplace(topology::load()); });
  return found;
}

std::vector<device_description> machine::devices() const {
  std::vector<device_description> all;
  if (on == nullptr) return all;
  for (int i = 0; i < on->device_count(); ++i) all.push_back(on->describe(device_id{i}));
  return all;
}

std::vector<numa_node> machine::nodes() const {
  return on != nullptr ? on->numa_nodes() : std::vector<numa_node>{};
}

}  // namespace evmm::cli
