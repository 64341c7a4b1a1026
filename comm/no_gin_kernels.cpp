// SPDX-License-Identifier: Apache-2.0
#include "comm/gin_kernels.hpp"

#include <evmm/error.hpp>

namespace evmm {

int gin_kernels_version() noexcept {
  return 0;
}
int look_for_gin(const nccl_api&, ncclComm*, gin_fabric&) {
  return nccl_invalid_usage;
}
std::unique_ptr<gin_kernels> make_gin_kernels() {
  throw unsupported("evmm was built without nccl_device.h");
}

}  // namespace evmm
