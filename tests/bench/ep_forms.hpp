// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/job_support.hpp"

namespace evmm::bench {

/// The low-latency exchange by tokens, by source and by expert, both ways at once and split.
void add_low_latency(const job& at);
/// ep::exchange by expert, with rows quantised on the way, and the gradients.
void add_layouts(const job& at);

}  // namespace evmm::bench
