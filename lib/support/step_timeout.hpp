// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/environment.hpp"

#include <chrono>

namespace evmm {

/// Deadline of a step between ranks, and how long it may be.
constexpr long k_default_timeout = 30'000;
constexpr long k_longest_timeout = 7L * 24 * 3600 * 1000;

/// EVMM_TIMEOUT_MS, or the default. Throws invalid_argument for what cannot be read.
inline std::chrono::milliseconds timeout_from_environment() {
  return std::chrono::milliseconds(
      environment_integer("EVMM_TIMEOUT_MS", 1, k_longest_timeout).value_or(k_default_timeout));
}

}  // namespace evmm
