// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/nccl_state.hpp"

#include <evmm/comm/node_link.hpp>

#include <cstddef>
#include <memory>

namespace evmm {

/// Collective: large_transfers by ncclSend and ncclRecv, on two communicators of its own over the
/// ranks of `like`. Throws the same on all ranks.
std::unique_ptr<large_transfers> make_nccl_transfers(const nccl_communicator::state& like,
                                                     device_id device, std::size_t least,
                                                     std::size_t most);

}  // namespace evmm
