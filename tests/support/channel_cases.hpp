// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/symmetric_cases.hpp"

#include <evmm/comm/symmetric_channel.hpp>

#include <vector>

// What symmetric_channel promises, as cases that every rank runs side by side, on one node or on
// several: threads in tests/unit, processes in tests/mpi, with GPUs there when there are any.

namespace evmm::test {

/// Calls between two ranks, and what the channel refuses.
const std::vector<symmetric_case>& channel_cases();
/// Calls that all ranks make together.
const std::vector<symmetric_case>& channel_collective_cases();

/// all_to_all_v with blocks of very different sizes, over rounds, on a channel of these options.
void run_skewed_all_to_all(const rank_context& at, const channel_options& options);

}  // namespace evmm::test
