// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/symmetric_cases.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

// What ep::table promises, as cases that every rank runs side by side; see symmetric_cases.hpp.

namespace evmm::test {

const std::vector<symmetric_case>& table_cases();

/// `count` rounds on tables of random shape, each of gathers in every order, with and without a
/// cache, and of rows that are written anew, all verified.
void run_random_tables(const rank_context& at, std::size_t count, std::uint64_t seed);

}  // namespace evmm::test
