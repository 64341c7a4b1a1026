// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <cstdint>

// Known bytes into device or host memory and back, through the driver, so that the same test runs
// where the CPU cannot touch device memory.

namespace evmm::test {

/// Fills [at, at + bytes) with bytes that `seed` and the position decide; blocks.
void write_pattern(driver& on, address at, std::size_t bytes, std::uint64_t seed);
/// Whether the bytes are those of write_pattern; blocks.
bool holds_pattern(driver& on, address at, std::size_t bytes, std::uint64_t seed);

}  // namespace evmm::test
