// SPDX-License-Identifier: Apache-2.0
#include "tests/support/driver_capture_contract.hpp"
#include "tests/support/driver_memory_contract.hpp"
#include "tests/support/driver_pool_contract.hpp"
#include "tests/support/driver_stream_contract.hpp"
#include "tests/support/driver_word_contract.hpp"
#include "tests/support/pinned_contract.hpp"

#include <evmm/host_driver.hpp>

#include <gtest/gtest.h>

namespace evmm::test {
namespace {

std::shared_ptr<driver> machine(bool fabric) {
  return host_driver::make({.devices = 2,
                            .device_bytes = 256_MiB,
                            .host_bytes = 256_MiB,
                            .numa_nodes = {0, 1},
                            .fabric = fabric});
}

const auto k_drivers = ::testing::Values(
    driver_choice{"host", [](std::string*) { return machine(false); }},
    driver_choice{"host_with_fabric", [](std::string*) { return machine(true); }},
    driver_choice{"fault_driver", [](std::string*) { return fault_driver::make(machine(false)); }});
const auto k_name = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(drivers, driver_capture_contract, k_drivers, k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_memory_contract, k_drivers, k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_pool_contract, k_drivers, k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_stream_contract, k_drivers, k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_word_contract, k_drivers, k_name);
INSTANTIATE_TEST_SUITE_P(drivers, pinned_contract, k_drivers, k_name);

}  // namespace
}  // namespace evmm::test
