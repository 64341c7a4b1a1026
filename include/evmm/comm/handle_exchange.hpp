// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>
#include <evmm/driver.hpp>
#include <evmm/physical_memory.hpp>

#include <memory>
#include <span>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Gives the ranks of a node each other's physical memory.
///
/// Handles travel over Unix sockets in the abstract namespace (nothing on disk, nothing left after
/// a crash), under random names. A connection is served only when the kernel says that the peer is
/// the same user and the process that the rank announced, and when it shows the job's secret;
/// messages carry a magic, a version, a length and a sequence number, all checked. Each handle goes
/// as what it was created for: as a descriptor, or as a fabric handle where the driver of every
/// rank of the node has proved those.
///
/// Threads: one thread at a time. Streams: none.
/// Order: all ranks of the job construct it together; the ranks of a node make the same calls of
///   exchange() in the same order.
/// Errors: a rank that cannot export says so to its peers in the handles' place, so that nobody
///   waits for it; a peer that is lost or silent is a peer_error or timed_out naming it, within the
///   bootstrap's timeout, and breaks the exchange: later calls throw peer_error at once. No
///   descriptor survives a call, whatever it throws.
class handle_exchange {
 public:
  /// Connects the node's ranks. Collective over the job: all ranks return, or all throw the same
  /// error; unsupported when the driver of any rank has no way to share, invalid_argument when
  /// ranks of a node have different drivers. Keeps both arguments.
  handle_exchange(std::shared_ptr<bootstrap> ranks, std::shared_ptr<driver> on);
  handle_exchange(handle_exchange&&) noexcept;
  handle_exchange& operator=(handle_exchange&&) noexcept;
  ~handle_exchange();

  /// Sends `mine` to every other rank of the node and imports what they send. The result is
  /// indexed by node rank, then as in the sender's list; this rank's own entry is empty.
  /// Throws when anything failed here or a peer reported a failure; whatever the outcome, the
  /// caller then agrees, and keeps `mine` until it has: a peer may not have imported it yet. The
  /// exchange stays in step with its peers unless one was lost, and can be used again.
  std::vector<std::vector<physical_memory>> exchange(std::span<const physical_memory* const> mine);

  /// What to create memory for that is to be shared here: fabric where every rank of the node has
  /// proved it, else fd.
  share_kind transport() const noexcept;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm
