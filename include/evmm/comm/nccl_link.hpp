// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/node_link.hpp>

#include <memory>

namespace [[gnu::visibility("default")]] evmm {

/// A link between nodes whose exchanges (the far part of symmetric_channel::all_to_all_v) NCCL
/// carries, by sends and receives in stream order: over the network that it finds, without a stop
/// in host memory where that can reach the GPUs'. Everything else goes in messages over `messages`,
/// as bootstrap::make_link makes it. The communicator may be destroyed before the link, which keeps
/// what it needs; closed, exchanges are an invalid_argument.
///
/// Streams: an exchange whose peer is gone holds its stream until NCCL gives up, or the
///   communicator is aborted: the channel's deadlines do not reach into NCCL's kernels.
std::shared_ptr<node_link> make_nccl_link(const nccl_communicator& over,
                                          std::shared_ptr<node_link> messages);

}  // namespace evmm
