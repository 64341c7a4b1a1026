// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bandwidth_kernels.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <string>

namespace evmm::bench {

namespace {

constexpr int k_threads = 512;
constexpr int k_unroll = 8;  // 16-byte accesses in flight a thread
constexpr std::size_t k_chunk = std::size_t{k_threads} * k_unroll;
constexpr int k_blocks_a_multiprocessor = 4;
constexpr int k_passes = 8;
static_assert(bandwidth_probe::unit % (k_chunk * sizeof(uint4)) == 0);

// Each block takes whole chunks, so that no access needs a bound; `sink` is never written, and
// keeps the loads alive.
__global__ void __launch_bounds__(k_threads)
    read_all(const uint4* from, std::size_t chunks, uint4* sink) {
  uint4 folded{};
  for (std::size_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    const uint4* at = from + chunk * k_chunk + threadIdx.x;
    uint4 values[k_unroll];
#pragma unroll
    for (int i = 0; i < k_unroll; ++i) values[i] = __ldcs(at + i * k_threads);
#pragma unroll
    for (int i = 0; i < k_unroll; ++i) {
      folded.x ^= values[i].x;
      folded.y ^= values[i].y;
      folded.z ^= values[i].z;
      folded.w ^= values[i].w;
    }
  }
  // Every word that write_all left behind is even.
  if ((folded.x | folded.y | folded.z | folded.w) & 1u) *sink = folded;
}

__global__ void __launch_bounds__(k_threads) write_all(uint4* to, std::size_t chunks, uint4 value) {
  for (std::size_t chunk = blockIdx.x; chunk < chunks; chunk += gridDim.x) {
    uint4* at = to + chunk * k_chunk + threadIdx.x;
#pragma unroll
    for (int i = 0; i < k_unroll; ++i) __stcs(at + i * k_threads, value);
  }
}

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code), {}, code);
}

}  // namespace

struct bandwidth_probe::state {
  int device = 0;
  int blocks = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  uint4* sink = nullptr;

  template <class Launch>
  double seconds_a_pass(Launch&& launch) {
    check(cudaSetDevice(device), "cudaSetDevice");
    launch();  // the first touch of a mapping fills translation tables
    check(cudaEventRecord(begin, stream), "cudaEventRecord");
    for (int pass = 0; pass < k_passes; ++pass) launch();
    check(cudaGetLastError(), "kernel launch");
    check(cudaEventRecord(end, stream), "cudaEventRecord");
    check(cudaEventSynchronize(end), "cudaEventSynchronize");
    float milliseconds = 0;
    check(cudaEventElapsedTime(&milliseconds, begin, end), "cudaEventElapsedTime");
    return milliseconds * 1e-3 / k_passes;
  }
};

bandwidth_probe::bandwidth_probe(device_id device) : state_(new state) {
  state_->device = device.value;
  int multiprocessors = 0;
  check(cudaSetDevice(device.value), "cudaSetDevice");
  check(cudaDeviceGetAttribute(&multiprocessors, cudaDevAttrMultiProcessorCount, device.value),
        "cudaDeviceGetAttribute");
  state_->blocks = multiprocessors * k_blocks_a_multiprocessor;
  check(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreate(&state_->begin), "cudaEventCreate");
  check(cudaEventCreate(&state_->end), "cudaEventCreate");
  check(cudaMalloc(&state_->sink, sizeof(uint4)), "cudaMalloc");
}

bandwidth_probe::~bandwidth_probe() {
  (void)cudaFree(state_->sink);
  (void)cudaEventDestroy(state_->end);
  (void)cudaEventDestroy(state_->begin);
  (void)cudaStreamDestroy(state_->stream);
  delete state_;
}

double bandwidth_probe::read(address at, std::size_t bytes) {
  return state_->seconds_a_pass([&] {
    read_all<<<state_->blocks, k_threads, 0, state_->stream>>>(
        reinterpret_cast<const uint4*>(at), bytes / (k_chunk * sizeof(uint4)), state_->sink);
  });
}

double bandwidth_probe::write(address at, std::size_t bytes) {
  return state_->seconds_a_pass([&] {
    write_all<<<state_->blocks, k_threads, 0, state_->stream>>>(
        reinterpret_cast<uint4*>(at), bytes / (k_chunk * sizeof(uint4)), uint4{2, 4, 6, 8});
  });
}

}  // namespace evmm::bench
