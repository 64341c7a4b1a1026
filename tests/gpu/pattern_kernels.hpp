// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <cstdint>

namespace evmm::test {

/// Writes a pattern, that `seed` and the place of each word decide, over [at, at + bytes), a
/// multiple of 8, by a kernel on `device`; blocks. Throws driver_error.
void write_by_kernel(device_id device, address at, std::size_t bytes, std::uint64_t seed);
/// How many words are not what write_by_kernel left; blocks.
std::uint64_t wrong_words_by_kernel(device_id device, address at, std::size_t bytes,
                                    std::uint64_t seed);

}  // namespace evmm::test
