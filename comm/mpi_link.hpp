// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/node_link.hpp>

#include <mpi.h>

#include <memory>

namespace evmm {

/// A link over a duplicate of `communicator`, whose ranks are those of the bootstrap. Collective.
/// Throws unsupported, on all ranks, where MPI was initialised for fewer threads than it takes.
std::shared_ptr<node_link> make_mpi_link(bootstrap& ranks, MPI_Comm communicator);

}  // namespace evmm
