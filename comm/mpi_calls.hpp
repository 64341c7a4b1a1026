// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <chrono>
#include <mutex>
#include <shared_mutex>

namespace evmm::mpi {

/// Throws peer_error with MPI's text unless the call succeeded.
void check(int code, const char* call);
/// Initialises MPI when nobody has, so that any thread may call it, and then finalises it at exit.
void initialize();
/// MPI_Comm_dup with a deadline, and errors returned instead of fatal.
MPI_Comm duplicate(MPI_Comm of, std::chrono::milliseconds timeout);
int rank_in(MPI_Comm communicator);
int size_of(MPI_Comm communicator);
/// Whether MPI may still be called to give something back: not after its end, nor in a forked
/// child, where the parent's connections would be taken down.
bool usable() noexcept;
/// A message was lost: MPI_Finalize might then wait for a dead rank without end, and is left out.
void mark_lost() noexcept;

/// For calls of MPI by a thread of this library's own: MPI_Finalize, whoever calls it and when,
/// waits for them, and none comes after it.
class thread_call {
 public:
  thread_call();
  /// Whether MPI is still there.
  explicit operator bool() const noexcept { return there_; }

 private:
  std::shared_lock<std::shared_mutex> held_;
  bool there_;
};
/// Makes MPI_Finalize do so.
void watch_finalize();

}  // namespace evmm::mpi
