// SPDX-License-Identifier: Apache-2.0
#include "layer_math.hpp"

#include <evmm/error.hpp>

namespace moe {

std::unique_ptr<layer_math> make_math(device_memory& memory) {
  if (memory.on->info().kind == evmm::driver_kind::host) return make_cpu_math(memory);
  return make_cuda_math(memory);
}

#if !defined(MOE_LAYER_CUDA)
std::unique_ptr<layer_math> make_cuda_math(device_memory&) {
  throw evmm::unsupported("this program was built without CUDA or without cuBLAS",
                          "configure it where both are found, or set EVMM_DRIVER=host");
}
#endif

}  // namespace moe
