// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <mpi.h>

#include <chrono>

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

}  // namespace evmm::mpi
