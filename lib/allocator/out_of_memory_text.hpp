// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/allocator_state.hpp"

#include <evmm/error.hpp>

namespace [[gnu::visibility("default")]] evmm {

/// The error of a request that failed: what was asked, what is held and by whom, why it does not
/// serve, and the option that would help. Under the slow lock.
out_of_memory out_of_memory_text(caching_allocator::state& of, const arena& from, std::size_t size,
                                 const oom_report& report);

}  // namespace evmm
