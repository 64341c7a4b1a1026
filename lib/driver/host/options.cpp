// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/options.hpp"

#include "lib/support/environment.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <string_view>

namespace evmm {

namespace {

constexpr int k_most_devices = 64;
constexpr int k_most_nodes = 1024;  // what the kernel can be built for

std::vector<int> parse_nodes(std::string_view text) {
  std::vector<int> nodes;
  const char* at = text.data();
  const char* const end = at + text.size();
  for (;;) {
    int node = 0;
    const auto [stop, failure] = std::from_chars(at, end, node);
    if (failure != std::errc{} || (stop != end && *stop != ',')) {
      throw invalid_argument(fmt::format("EVMM_HOST_NUMA_NODES is '{}'", text),
                             "write node numbers with commas between them, such as 0,1");
    }
    nodes.push_back(node);
    if (stop == end) return nodes;
    at = stop + 1;
  }
}

}  // namespace

host_driver_options host_driver_options::from_environment() {
  host_driver_options options;
  if (const auto devices = environment_integer("EVMM_HOST_DEVICES", 1, k_most_devices)) {
    options.devices = static_cast<int>(*devices);
  }
  options.device_bytes = environment_bytes("EVMM_HOST_DEVICE_BYTES").value_or(options.device_bytes);
  options.host_bytes = environment_bytes("EVMM_HOST_BYTES").value_or(options.host_bytes);
  if (const auto nodes = environment("EVMM_HOST_NUMA_NODES")) {
    options.numa_nodes = parse_nodes(*nodes);
  }
  options.fabric = environment_integer("EVMM_HOST_FABRIC", 0, 1).value_or(options.fabric) != 0;
  return options;
}

namespace host {

host_driver_options checked(host_driver_options options) {
  if (options.devices < 1 || options.devices > k_most_devices) {
    throw invalid_argument(fmt::format("{} devices, of which a host driver has 1 to {}",
                                       options.devices, k_most_devices),
                           "set host_driver_options::devices (EVMM_HOST_DEVICES)");
  }
  auto& nodes = options.numa_nodes;
  std::sort(nodes.begin(), nodes.end());
  const auto twice = std::adjacent_find(nodes.begin(), nodes.end());
  if (!nodes.empty() &&
      (nodes.front() < 0 || nodes.back() >= k_most_nodes || twice != nodes.end())) {
    throw invalid_argument(twice != nodes.end()
                               ? fmt::format("NUMA node {} is named twice", *twice)
                               : fmt::format("NUMA nodes {} to {}, of which there are 0 to {}",
                                             nodes.front(), nodes.back(), k_most_nodes - 1),
                           "correct host_driver_options::numa_nodes (EVMM_HOST_NUMA_NODES)");
  }
  return options;
}

}  // namespace host
}  // namespace evmm
