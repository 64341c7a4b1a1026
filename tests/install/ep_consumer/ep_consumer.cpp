// SPDX-License-Identifier: Apache-2.0
// A program of a user of evmm::ep, who names nothing else.
#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <cstdio>
#include <exception>

using namespace evmm::units;

int main() {
  try {
    const auto driver = evmm::host_driver::make({});
    const auto ranks = evmm::make_thread_bootstraps(1);
    evmm::symmetric_heap heap({ranks[0], driver, {.reserve = 1_GiB}});
    {
      const evmm::ep::exchange exchange(
          heap, {.experts = 4, .top_k = 2, .hidden = 512, .max_tokens = 16});
    }
    heap.close();
    return 0;
  } catch (const std::exception& failure) {
    std::fprintf(stderr, "ep_consumer: %s\n", failure.what());
    return 1;
  }
}
