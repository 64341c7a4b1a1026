// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>

#include <memory>

namespace evmm::test {

/// The ranks of this run, over MPI_COMM_WORLD. Shared by all tests, which leave it in step: a test
/// that breaks a bootstrap makes its own.
const std::shared_ptr<bootstrap>& world();

}  // namespace evmm::test
