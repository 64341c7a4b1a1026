// SPDX-License-Identifier: Apache-2.0
// What stands in for the CUDA driver in a build without the CUDA Toolkit.
#include <evmm/driver.hpp>
#include <evmm/error.hpp>

namespace evmm {

namespace {
constexpr const char* k_reason = "evmm was built without CUDA";
}  // namespace

bool cuda_available(std::string* why_not) {
  if (why_not != nullptr) *why_not = k_reason;
  return false;
}

std::shared_ptr<driver> make_cuda_driver() {
  throw unsupported(k_reason, "build with EVMM_CUDA=ON, or set EVMM_DRIVER=host");
}

}  // namespace evmm
