// SPDX-License-Identifier: Apache-2.0
#include "tests/support/region_contract.hpp"

#include "tests/support/region_fault_contract.hpp"

#include <evmm/driver.hpp>

namespace evmm::test {
namespace {

const driver_choice k_cuda{"cuda", [](std::string* why_not) -> std::shared_ptr<driver> {
                             if (!cuda_available(why_not)) return nullptr;
                             return make_cuda_driver();
                           }};
const auto k_name = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(drivers, region_contract, ::testing::Values(k_cuda), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, region_fault_contract, ::testing::Values(k_cuda), k_name);

}  // namespace
}  // namespace evmm::test
