// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/topology.hpp>

#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace evmm::cli {

/// What the commands look at. Nothing here throws: what is missing says why.
struct machine {
  std::shared_ptr<driver> on;  ///< null when none could be made
  std::string driver_error;    ///< why, then
  bool cuda = false;           ///< a CUDA driver and a GPU are here
  std::string cuda_why_not;
  std::optional<topology> map;
  std::string topology_error;

  std::vector<device_description> devices() const;
  std::vector<numa_node> nodes() const;
};

/// The driver that programs get here (EVMM_DRIVER counts), and the machine's topology.
machine look_at_machine();

/// Runs `step`; the message of the exception it threw, empty when it did not.
template <class Step>
std::string failure_of(Step&& step) {
  try {
    step();
  } catch (const std::exception& failure) {
    return failure.what();
  }
  return {};
}

}  // namespace evmm::cli
