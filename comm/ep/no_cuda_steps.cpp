// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/ep_steps.hpp"

#include <evmm/error.hpp>

namespace evmm::ep {

std::unique_ptr<ep_steps> make_cuda_steps(device_id, int, int, int) {
  throw unsupported("this build of evmm has no CUDA kernels", "build with EVMM_CUDA=ON and nvcc");
}

}  // namespace evmm::ep
