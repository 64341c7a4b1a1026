// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/symmetric_cases.hpp"

#include <evmm/comm/symmetric_heap.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

// What symmetric_heap promises, as cases that every rank runs side by side; see
// symmetric_cases.hpp.

namespace evmm::test {

const std::vector<symmetric_case>& heap_cases();
/// Growth, trimming, migration, compaction, and calls that differ.
const std::vector<symmetric_case>& heap_change_cases();

/// `count` operations that a seed decides, the same on every rank, on streams that each rank delays
/// in its own way: what a block holds is checked before it is freed, and all ranks compare offsets.
void run_random_heap(const rank_context& at, std::size_t count, std::uint64_t seed);

}  // namespace evmm::test
