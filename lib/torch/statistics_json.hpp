// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/statistics.hpp>

#include <string>

namespace evmm::torch {

/// One flat JSON object of integers under the names of torch.cuda.memory_stats.
std::string statistics_json(const allocator_statistics& statistics);

}  // namespace evmm::torch
