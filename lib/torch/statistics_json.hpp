// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/caching_allocator.hpp>

#include <functional>
#include <string>

namespace evmm::torch {

/// One flat JSON object of integers under the names of torch.cuda.memory_stats; `name_of` has those
/// of private pools.
std::string statistics_json(const allocator_statistics& statistics,
                            const std::function<pool_number(pool_id)>& name_of);

}  // namespace evmm::torch
