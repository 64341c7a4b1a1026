// SPDX-License-Identifier: Apache-2.0
#include <evmm/comm/bootstrap.hpp>

namespace evmm {

std::shared_ptr<bootstrap> make_mpi_bootstrap(ompi_communicator_t*) {
  throw unsupported("this evmm was built without MPI",
                    "build with EVMM_MPI=ON, or use make_store_bootstrap");
}

}  // namespace evmm
