// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <cstdint>

// Known bytes into device or host memory and back, through the driver, so that the same test runs
// where the CPU cannot touch device memory.

namespace evmm::test {

/// Fills [at, at + bytes) with bytes that `seed` and the position decide; blocks. `device` has
/// access to the memory: a copy by another one hangs (H200, driver 580.159.04).
void write_pattern(driver& on, address at, std::size_t bytes, std::uint64_t seed,
                   device_id device = {0});
/// Whether the bytes are those of write_pattern; blocks.
bool holds_pattern(driver& on, address at, std::size_t bytes, std::uint64_t seed,
                   device_id device = {0});

}  // namespace evmm::test
