// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/cuda_device.cuh"

#include <evmm/error.hpp>

#include <string>

namespace evmm::ep {

namespace {

/// Room for what the kernels declare themselves.
constexpr int k_static_shared = 1024;

int attribute(int device, cudaDeviceAttr which) {
  int value = 0;
  check_cuda(cudaDeviceGetAttribute(&value, which, device), "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code),
                     code == cudaErrorNoKernelImageForDevice
                         ? "build evmm with EVMM_CUDA_ARCHITECTURES naming this GPU's"
                         : "",
                     code);
}

void require_kernels(int device) {
  const int major = attribute(device, cudaDevAttrComputeCapabilityMajor);
  if (major >= 8) return;
  throw unsupported("the kernels of evmm::ep do not run on DEVICE " + std::to_string(device) +
                        " (compute capability " + std::to_string(major) + ")",
                    "use a GPU of compute capability 8.0 or later");
}

bool begins_early(int device) {
  return attribute(device, cudaDevAttrComputeCapabilityMajor) >= 9;
}

int checked_sms(int device, const char* option, int sms) {
  const int all = attribute(device, cudaDevAttrMultiProcessorCount);
  if (sms <= all) return sms == 0 ? all : sms;
  throw invalid_argument(std::string(option) + " is " + std::to_string(sms) + ": DEVICE " +
                         std::to_string(device) + " has " + std::to_string(all));
}

void load_kernels(std::initializer_list<const void*> kernels) {
  for (const void* kernel : kernels) {
    cudaFuncAttributes loaded{};
    check_cuda(cudaFuncGetAttributes(&loaded, kernel), "cudaFuncGetAttributes");
  }
}

std::size_t allow_shared(int device, const void* kernel) {
  const int most = attribute(device, cudaDevAttrMaxSharedMemoryPerBlockOptin) - k_static_shared;
  check_cuda(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most),
             "cudaFuncSetAttribute");
  return static_cast<std::size_t>(most);
}

}  // namespace evmm::ep
