// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/node_link.hpp>

#include <memory>

namespace [[gnu::visibility("default")]] evmm {

/// How an NCCL link exchanges.
struct nccl_link_options {
  /// By GPU-initiated networking (GIN) where all ranks have it: a kernel puts each block where it
  /// belongs in the receiver's window. It takes NCCL 2.30.4 or later, the very one that evmm was
  /// built with, InfiniBand or RoCE with GPUDirect RDMA, and symmetric_options::rdma; not run on
  /// such a network yet. Elsewhere, and without this, by ncclSend and ncclRecv. A rank that says no
  /// says it for all.
  bool gin = true;
  /// Puts and gets of so many bytes or more, of memory that kernels reach, go by ncclSend and
  /// ncclRecv too: from GPU to GPU, not through staging memory. 0 leaves all to messages, on all
  /// ranks when one says so.
  std::size_t large = std::size_t{4} << 20;
  /// What a rank receives at a time of a large put or get, above 0; the others' turns come between.
  std::size_t large_piece = std::size_t{64} << 20;
};

/// A link between nodes whose exchanges (the far part of symmetric_channel::all_to_all_v) NCCL
/// carries in stream order: over the network that it finds, without a stop in host memory where
/// that can reach the GPUs'. So it does with large puts and gets, on two more communicators for
/// each channel. Everything else, signals too, goes in messages over `messages`, as
/// bootstrap::make_link makes it. channel_statistics says which way a channel goes, and why not by
/// GIN. The communicator may be destroyed before the link, which keeps what it needs; closed,
/// exchanges by send and receive are an invalid_argument.
///
/// Addresses: for GIN the channel's region is in an nccl_window, on a communicator of its own of
///   the same ranks. A change of the region waits for exchanges under way; while it leaves the
///   window down, exchanges go by send and receive.
/// Streams: a send or receive whose peer is gone holds its stream until NCCL gives up, or the
///   communicator is aborted: the channel's deadlines do not reach into NCCL's kernels. Those of
///   GIN give up after the bootstrap's timeout, and check() throws. A large put or get runs
///   NCCL's kernels beside the stream's work, on both sides, and ends by the channel's deadlines: a
///   kernel that fills the GPU until it is signalled would wait for ever for what is large.
std::shared_ptr<node_link> make_nccl_link(const nccl_communicator& over,
                                          std::shared_ptr<node_link> messages,
                                          const nccl_link_options& options = {});

}  // namespace evmm
