// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/gin_kernels.hpp"
#include "comm/nccl_state.hpp"
#include "comm/put_exchange.hpp"

#include <evmm/comm/symmetric_region.hpp>

#include <memory>
#include <string>

namespace evmm {

// NCCL's GPU-initiated networking (GIN) for exchanges: whether it is there, and the port over it.

/// Why kernels that were compiled with one NCCL's nccl_device.h do not run on another NCCL; empty
/// when they do. They read what the library lays out for them, which has no promise across
/// versions.
std::string why_not_gin_kernels(int compiled, int loaded);
/// Why a fabric does not do for exchanges between all ranks; empty when it does.
std::string why_not_gin_fabric(const gin_fabric& fabric);
/// All that this rank can find out by itself; throws what NCCL failed with.
std::string why_not_gin(const nccl_communicator::state& over);

/// Collective: a port for a region on the ranks and the device of a communicator, which all find
/// GIN usable. It has a communicator of its own, so that one which fails here takes no other along.
/// Throws the same on all ranks.
std::unique_ptr<put_port> make_gin_port(const nccl_communicator::state& like,
                                        symmetric_region& region);

}  // namespace evmm
