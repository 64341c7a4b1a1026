// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/error.hpp>

#include <chrono>
#include <span>
#include <string>
#include <string_view>

namespace evmm {

/// "rank 2", "ranks 2 and 3", "ranks 0, 2 and 3".
std::string ranks_text(std::span<const int> ranks);

/// The error of a step whose deadline passed, naming the ranks that did not arrive.
error_info not_arrived(std::string_view step, std::span<const int> missing,
                       std::chrono::milliseconds timeout);

}  // namespace evmm
