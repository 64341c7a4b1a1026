// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/symmetric_cases.hpp"

#include <vector>

// What windows promise with whatever NCCL is loaded, as cases that every rank runs side by side: on
// the fake NCCL in processes, and on the real one where there are GPUs.

namespace evmm::test {

const std::vector<symmetric_case>& nccl_cases();

}  // namespace evmm::test
