// SPDX-License-Identifier: Apache-2.0
#include "tests/gpu/pattern_kernels.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <string>

namespace evmm::test {

namespace {

constexpr int k_threads = 512;
constexpr int k_blocks = 1024;

__device__ std::uint64_t word_at(std::uint64_t seed, std::size_t i) {
  std::uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  return z ^ (z >> 27);
}

__global__ void __launch_bounds__(k_threads)
    write_words(std::uint64_t* to, std::size_t count, std::uint64_t seed) {
  const std::size_t step = std::size_t{gridDim.x} * k_threads;
  for (std::size_t i = std::size_t{blockIdx.x} * k_threads + threadIdx.x; i < count; i += step) {
    to[i] = word_at(seed, i);
  }
}

__global__ void __launch_bounds__(k_threads)
    count_wrong(const std::uint64_t* from, std::size_t count, std::uint64_t seed,
                unsigned long long* wrong) {
  const std::size_t step = std::size_t{gridDim.x} * k_threads;
  unsigned long long mine = 0;
  for (std::size_t i = std::size_t{blockIdx.x} * k_threads + threadIdx.x; i < count; i += step) {
    mine += __ldcs(from + i) != word_at(seed, i);
  }
  if (mine != 0) atomicAdd(wrong, mine);
}

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code), {}, code);
}

}  // namespace

void write_by_kernel(device_id device, address at, std::size_t bytes, std::uint64_t seed) {
  check(cudaSetDevice(device.value), "cudaSetDevice");
  write_words<<<k_blocks, k_threads>>>(reinterpret_cast<std::uint64_t*>(at), bytes / 8, seed);
  check(cudaGetLastError(), "write_words");
  check(cudaDeviceSynchronize(), "write_words");
}

std::uint64_t wrong_words_by_kernel(device_id device, address at, std::size_t bytes,
                                    std::uint64_t seed) {
  check(cudaSetDevice(device.value), "cudaSetDevice");
  unsigned long long* counted = nullptr;
  check(cudaMalloc(&counted, sizeof(*counted)), "cudaMalloc");
  check(cudaMemset(counted, 0, sizeof(*counted)), "cudaMemset");
  count_wrong<<<k_blocks, k_threads>>>(reinterpret_cast<const std::uint64_t*>(at), bytes / 8, seed,
                                       counted);
  check(cudaGetLastError(), "count_wrong");
  unsigned long long wrong = 0;
  const cudaError_t copied = cudaMemcpy(&wrong, counted, sizeof(wrong), cudaMemcpyDeviceToHost);
  (void)cudaFree(counted);
  check(copied, "count_wrong");
  return wrong;
}

}  // namespace evmm::test
