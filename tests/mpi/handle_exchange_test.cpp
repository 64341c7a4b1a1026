// SPDX-License-Identifier: Apache-2.0
#include "tests/mpi/mpi_main.hpp"
#include "tests/support/exchange_contract.hpp"
#include "tests/support/fault_driver.hpp"

#include <evmm/comm/handle_exchange.hpp>
#include <evmm/host_driver.hpp>

#include <gtest/gtest.h>

#include <memory>

namespace evmm::test {
namespace {

class handle_exchange_between_processes : public testing::TestWithParam<bool> {
 protected:
  std::shared_ptr<fault_driver> on = fault_driver::make(
      host_driver::make({.host_bytes = std::size_t{1} << 32, .fabric = GetParam()}));
};

TEST_P(handle_exchange_between_processes, shares_memory_and_leaves_nothing) {
  const auto before = on->alive();
  {
    handle_exchange exchange(world(), on);
    EXPECT_EQ(exchange.transport(), GetParam() ? share_kind::fabric : share_kind::fd);
    for (const std::size_t count : {1, 0, 9}) check_exchange(*world(), *on, exchange, count);
    check_exchange(*world(), *on, exchange, 30, true);
    if (world()->size() > 1) check_refusal(*world(), *on, exchange);
  }
  EXPECT_EQ(on->alive(), before);
}

INSTANTIATE_TEST_SUITE_P(transport, handle_exchange_between_processes, testing::Bool(),
                         [](const auto& info) { return info.param ? "fabric" : "fd"; });

}  // namespace
}  // namespace evmm::test
