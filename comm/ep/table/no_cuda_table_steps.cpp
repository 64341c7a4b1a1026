// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/table/table_steps.hpp"

#include <evmm/error.hpp>

namespace evmm::ep {

std::unique_ptr<table_steps> make_cuda_table_steps(device_id, std::uint32_t) {
  throw unsupported("this build of evmm has no CUDA kernels", "build with EVMM_CUDA=ON and nvcc");
}

}  // namespace evmm::ep
