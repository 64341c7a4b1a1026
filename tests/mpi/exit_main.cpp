// SPDX-License-Identifier: Apache-2.0
// A program that ends, by itself or MPI, with a channel between two nodes that nobody closed: its
// thread is in MPI meanwhile. CTest looks at the exit code.
#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/symmetric_channel.hpp>
#include <evmm/comm/symmetric_region.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <mpi.h>

#include <cstdlib>
#include <string_view>

int main(int argc, char** argv) {
  using namespace evmm::units;
  setenv("EVMM_HOST_ID", std::getenv("OMPI_COMM_WORLD_RANK"), 1);
  const bool finalizes = argc > 1 && std::string_view(argv[1]) == "finalize";
  const auto ranks = evmm::make_mpi_bootstrap();
  evmm::symmetric_region region(ranks, evmm::host_driver::make({}), {.reserve = 64_MiB});
  region.grow(evmm::tier::device, 2_MiB);
  const evmm::symmetric_channel channel(region);
  if (!finalizes) std::exit(0);
  MPI_Finalize();
}
