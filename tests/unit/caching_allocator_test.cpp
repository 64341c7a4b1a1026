// SPDX-License-Identifier: Apache-2.0
#include "tests/support/allocator_backend_contract.hpp"
#include "tests/support/allocator_call_contract.hpp"
#include "tests/support/allocator_capture_contract.hpp"
#include "tests/support/allocator_checkpoint_contract.hpp"
#include "tests/support/allocator_expandable_contract.hpp"
#include "tests/support/allocator_history_contract.hpp"
#include "tests/support/allocator_pool_contract.hpp"
#include "tests/support/allocator_sharing_contract.hpp"
#include "tests/support/allocator_shortage_contract.hpp"
#include "tests/support/allocator_size_contract.hpp"
#include "tests/support/allocator_statistics_contract.hpp"
#include "tests/support/allocator_stream_contract.hpp"

#include <evmm/host_driver.hpp>

namespace evmm::test {
namespace {

const driver_choice k_host{
    "host", [](std::string*) {
      return host_driver::make({.devices = 2, .device_bytes = 1_GiB, .host_bytes = 1_GiB});
    }};
const auto k_name = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(drivers, allocator_backend_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_call_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_capture_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_checkpoint_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_expandable_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_history_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_pool_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_sharing_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_shortage_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_size_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_statistics_contract, ::testing::Values(k_host), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, allocator_stream_contract, ::testing::Values(k_host), k_name);

}  // namespace
}  // namespace evmm::test
