// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/ep_steps.hpp"
#include "comm/ep/low_latency_steps.hpp"
#include "comm/ep/rail_steps.hpp"

#include <evmm/error.hpp>

namespace evmm::ep {

namespace {

[[noreturn]] void refuse() {
  throw unsupported("this build of evmm has no CUDA kernels", "build with EVMM_CUDA=ON and nvcc");
}

}  // namespace

std::unique_ptr<ep_steps> make_cuda_steps(device_id, int, int, int) {
  refuse();
}
std::unique_ptr<rail_steps> make_cuda_rail_steps(device_id) {
  refuse();
}
std::unique_ptr<low_latency_steps> make_cuda_low_latency_steps(device_id, int) {
  refuse();
}

}  // namespace evmm::ep
