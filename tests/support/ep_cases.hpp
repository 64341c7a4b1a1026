// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/symmetric_cases.hpp"

#include <evmm/comm/symmetric_channel.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

// What the exchanges promise, as cases that every rank runs side by side; see symmetric_cases.hpp.

namespace evmm::test {

const std::vector<symmetric_case>& ep_cases();
/// Which of its calls go together.
const std::vector<symmetric_case>& ep_call_cases();
/// The same for ep::low_latency_exchange.
const std::vector<symmetric_case>& low_latency_cases();
/// And when a rank does not come.
const std::vector<symmetric_case>& lost_rank_cases();

/// `count` exchanges of random shape, routing and contents, each verified, with streams that each
/// rank delays in its own way.
void run_random_exchanges(const rank_context& at, std::size_t count, std::uint64_t seed,
                          const channel_options& across = {});
void run_random_low_latency(const rank_context& at, std::size_t count, std::uint64_t seed,
                            const channel_options& across = {});

}  // namespace evmm::test
