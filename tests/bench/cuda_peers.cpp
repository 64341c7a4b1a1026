// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/cuda_peers.hpp"

#include <evmm/units.hpp>

#include <cuda_runtime.h>

#include <optional>
#include <string>

namespace evmm::bench {

namespace {

using namespace evmm::units;

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string message = std::string(call) + ": " + cudaGetErrorString(code);
  if (code == cudaErrorMemoryAllocation) throw out_of_memory(message);
  throw driver_error(message, {}, code);
}

class malloc_buffer {
 public:
  explicit malloc_buffer(std::size_t bytes) { check(cudaMalloc(&data_, bytes), "cudaMalloc"); }
  malloc_buffer(const malloc_buffer&) = delete;
  malloc_buffer& operator=(const malloc_buffer&) = delete;
  ~malloc_buffer() { free(); }
  void* data() const { return data_; }
  void free() {
    (void)cudaFree(data_);
    data_ = nullptr;
  }

 private:
  void* data_ = nullptr;
};

void make(benchmark::State& state, const machine& here, std::size_t bytes) {
  here.need(here.device_memory(), bytes);
  for (auto _ : state) {
    settle(here, bytes);
    std::optional<malloc_buffer> buffer;
    state.SetIterationTime(seconds([&] { buffer.emplace(bytes); }));
  }
  count_bytes(state, bytes);
}

// Old and new exist together: a buffer can only grow like this up to half of the memory.
void rebuild(benchmark::State& state, const machine& here, std::size_t bytes, std::size_t more) {
  here.need(here.device_memory(), 2 * bytes + more);
  for (auto _ : state) {
    malloc_buffer old(bytes);
    settle(here, 2 * bytes);
    state.SetIterationTime(seconds([&] {
      const malloc_buffer grown(bytes + more);
      check(cudaMemcpy(grown.data(), old.data(), bytes, cudaMemcpyDeviceToDevice), "cudaMemcpy");
      check(cudaDeviceSynchronize(), "cudaDeviceSynchronize");
      old.free();
    }));
  }
  count_bytes(state, more);
}

}  // namespace

void add_cuda_peers(const machine& here) {
  check(cudaSetDevice(here.device.id.value), "cudaSetDevice");
  const auto sizes = {1_GiB, 16_GiB, 64_GiB};
  add("grow/DEVICE/peer_cudaMalloc", sizes,
      [&here](auto& state, std::size_t bytes) { make(state, here, bytes); });
  add("extend_by_1_GiB/DEVICE/peer_cudaMalloc_copy_free", sizes,
      [&here](auto& state, std::size_t bytes) { rebuild(state, here, bytes, 1_GiB); });
}

}  // namespace evmm::bench
