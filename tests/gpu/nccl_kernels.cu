// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/nccl_kernels.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>
#include <nccl.h>
#if __has_include(<nccl_device.h>)
#include <nccl_device.h>
#define EVMM_NCCL_DEVICE 1
#endif

#include <string>

namespace evmm::test {

namespace {

constexpr int k_blocks = 132;
constexpr int k_threads = 512;

__device__ void count_differences(const std::uint64_t* a, const std::uint64_t* b, std::size_t words,
                                  unsigned long long* wrong) {
  unsigned long long mine = 0;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
    mine += a[i] != b[i] ? 1 : 0;
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

__global__ void compare_kernel(const std::uint64_t* a, const std::uint64_t* b, std::size_t words,
                               unsigned long long* wrong) {
  count_differences(a, b, words, wrong);
}

#ifdef EVMM_NCCL_DEVICE
__global__ void compare_lsa_kernel(const std::uint64_t* a, ncclWindow_t window, std::size_t offset,
                                   int peer, std::size_t words, unsigned long long* wrong) {
  count_differences(a, static_cast<std::uint64_t*>(ncclGetLsaPointer(window, offset, peer)), words,
                    wrong);
}

__global__ void count_lsa_kernel(ncclWindow_t window, std::size_t offset, int peer,
                                 std::size_t words, std::uint64_t first) {
  auto* const to = static_cast<std::uint64_t*>(ncclGetLsaPointer(window, offset, peer));
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
    to[i] = first + i;
  }
}
#endif

void check_launch() {
  const cudaError_t code = cudaGetLastError();
  if (code != cudaSuccess) throw driver_error(std::string("launch: ") + cudaGetErrorString(code));
}

}  // namespace

int compiled_nccl_version() {
  return NCCL_VERSION_CODE;
}

bool reads_windows_of(int version) {
#ifdef EVMM_NCCL_DEVICE
  // From 2.28 to 2.30 the fields that it reads lie at the same offsets (read in the sources).
  return version / 100 == NCCL_VERSION_CODE / 100 ||
         (NCCL_VERSION_CODE >= 22800 && version >= 22800 && version < 23100);
#else
  return false && version;
#endif
}

void compare(const std::uint64_t* a, const std::uint64_t* b, std::size_t words,
             unsigned long long* wrong, native_stream stream) {
  compare_kernel<<<k_blocks, k_threads, 0, stream>>>(a, b, words, wrong);
  check_launch();
}

void compare_with_lsa(const std::uint64_t* a, ncclWindow_vidmem* window, std::size_t offset,
                      int peer, std::size_t words, unsigned long long* wrong,
                      native_stream stream) {
#ifdef EVMM_NCCL_DEVICE
  compare_lsa_kernel<<<k_blocks, k_threads, 0, stream>>>(a, window, offset, peer, words, wrong);
  check_launch();
#else
  throw unsupported("built without nccl_device.h");
#endif
}

void count_into_lsa(ncclWindow_vidmem* window, std::size_t offset, int peer, std::size_t words,
                    std::uint64_t first, native_stream stream) {
#ifdef EVMM_NCCL_DEVICE
  count_lsa_kernel<<<k_blocks, k_threads, 0, stream>>>(window, offset, peer, words, first);
  check_launch();
#else
  throw unsupported("built without nccl_device.h");
#endif
}

}  // namespace evmm::test
