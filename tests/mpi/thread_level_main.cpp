// SPDX-License-Identifier: Apache-2.0
// A program that initialised MPI for one thread, on two nodes: a link between them must say what it
// takes. CTest looks for the line.
#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/node_link.hpp>
#include <evmm/error.hpp>

#include <mpi.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  int provided = 0;
  MPI_Init_thread(&argc, &argv, MPI_THREAD_FUNNELED, &provided);
  setenv("EVMM_HOST_ID", std::getenv("OMPI_COMM_WORLD_RANK"), 1);
  {
    const auto ranks = evmm::make_mpi_bootstrap();
    try {
      ranks->make_link();
    } catch (const evmm::unsupported& failure) {
      std::printf("rank %d: %s\n", ranks->rank().value, failure.what());
    }
  }
  MPI_Finalize();
}
