// SPDX-License-Identifier: Apache-2.0
#include "tests/support/driver_capture_contract.hpp"
#include "tests/support/driver_memory_contract.hpp"
#include "tests/support/driver_pool_contract.hpp"
#include "tests/support/driver_stream_contract.hpp"
#include "tests/support/driver_word_contract.hpp"
#include "tests/support/pinned_contract.hpp"

#include <gtest/gtest.h>

namespace evmm::test {
namespace {

const driver_choice k_cuda{"cuda", [](std::string* why_not) -> std::shared_ptr<driver> {
                             return cuda_available(why_not) ? make_cuda_driver() : nullptr;
                           }};
const auto k_name = [](const auto& info) { return info.param.name; };

INSTANTIATE_TEST_SUITE_P(drivers, driver_capture_contract, ::testing::Values(k_cuda), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_memory_contract, ::testing::Values(k_cuda), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_pool_contract, ::testing::Values(k_cuda), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_stream_contract, ::testing::Values(k_cuda), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, driver_word_contract, ::testing::Values(k_cuda), k_name);
INSTANTIATE_TEST_SUITE_P(drivers, pinned_contract, ::testing::Values(k_cuda), k_name);

}  // namespace
}  // namespace evmm::test
