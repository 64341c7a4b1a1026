// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ep_kernels.hpp"

#include <evmm/error.hpp>

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <string>

namespace evmm::bench {

namespace {

constexpr std::size_t k_flushed = std::size_t{256} << 20;  // the L2 cache of an H200 has 50 MiB

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code), {}, code);
}

__global__ void barrier_kernel(const __grid_constant__ symmetric_view view, std::uint64_t offset,
                               std::uint64_t round) {
  barrier(view, offset, round, std::uint64_t{1} << 28);
}

__global__ void fill_kernel(std::uint64_t* at, std::size_t words, std::uint64_t seed) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < words; i += step) {
    std::uint64_t z = seed + (i + 1) * 0x9e3779b97f4a7c15u;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    at[i] = z ^ (z >> 27);
  }
}

/// What rank `rank` makes of an element.
__device__ __nv_bfloat16 result_of(int rank, int source, int token, std::size_t element) {
  const auto step = static_cast<int>(
      (static_cast<std::size_t>(source) + static_cast<std::size_t>(token) + element) % 7);
  return __float2bfloat16(static_cast<float>((rank + 1) * (1 + step)));
}

// A block a row.
__global__ void fill_results_kernel(__nv_bfloat16* y, const __grid_constant__ ep_expected expected,
                                    int rank, std::size_t hidden) {
  for (std::size_t row = blockIdx.x; row < expected.rows; row += gridDim.x) {
    for (std::size_t i = threadIdx.x; i < hidden; i += blockDim.x) {
      y[row * hidden + i] = result_of(rank, expected.sources[row], expected.tokens[row], i);
    }
  }
}

// A block a row.
__global__ void wrong_rows_kernel(const __grid_constant__ symmetric_view view,
                                  const __grid_constant__ ep_rows got,
                                  const __grid_constant__ ep_expected expected,
                                  unsigned long long* wrong) {
  for (std::size_t row = blockIdx.x; row < expected.rows; row += gridDim.x) {
    const int source = expected.sources[row];
    const auto token = static_cast<std::size_t>(expected.tokens[row]);
    const std::size_t words = expected.row_words;
    const auto* sent = view.peer<std::uint64_t>(source, expected.x) + token * words;
    const auto* here = static_cast<const std::uint64_t*>(got.x) + row * words;
    bool differs = false;
    for (std::size_t i = threadIdx.x; got.x != nullptr && i < words; i += blockDim.x) {
      differs |= sent[i] != here[i];
    }
    const auto scales = static_cast<std::size_t>(expected.scale_count);
    // As bits: they are any.
    const auto* scales_sent = view.peer<std::uint32_t>(source, expected.scales) + token * scales;
    const auto* scales_here = reinterpret_cast<const std::uint32_t*>(got.scales) + row * scales;
    for (std::size_t i = threadIdx.x; got.scales != nullptr && i < scales; i += blockDim.x) {
      differs |= scales_sent[i] != scales_here[i];
    }
    for (int i = static_cast<int>(threadIdx.x); i < expected.top_k;
         i += static_cast<int>(blockDim.x)) {
      const std::size_t at = row * static_cast<std::size_t>(expected.top_k) + i;
      if (got.experts != nullptr) differs |= got.experts[at] != expected.experts[at];
      if (got.weights != nullptr) differs |= got.weights[at] != expected.weights[at];
    }
    if (got.tokens != nullptr) differs |= got.tokens[row] != expected.tokens[row];
    if (__syncthreads_or(differs) && threadIdx.x == 0) atomicAdd(wrong, 1ull);
  }
}

// A block a token.
__global__ void wrong_sums_kernel(const __nv_bfloat16* out, const std::uint64_t* masks, int rank,
                                  int ranks, std::size_t hidden, unsigned long long* wrong) {
  const std::size_t token = blockIdx.x;
  for (std::size_t i = threadIdx.x; i < hidden; i += blockDim.x) {
    float sum = 0;
    for (int r = 0; r < ranks; ++r) {
      if ((masks[token] >> r & 1) == 0) continue;
      sum += __bfloat162float(result_of(r, rank, static_cast<int>(token), i));
    }
    const float expected = __bfloat162float(__float2bfloat16(sum));
    if (__bfloat162float(out[token * hidden + i]) != expected) atomicAdd(wrong, 1ull);
  }
}

}  // namespace

struct ep_probe::state {
  symmetric_view view;
  std::uint64_t barrier_offset = 0;
  std::uint64_t round = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  void* flushed = nullptr;
  unsigned long long* counter = nullptr;

  template <class Launch>
  std::size_t count(Launch&& launch) {
    check(cudaMemsetAsync(counter, 0, sizeof(*counter), stream), "cudaMemsetAsync");
    launch(counter);
    check(cudaGetLastError(), "a check");
    unsigned long long counted = 0;
    check(cudaMemcpyAsync(&counted, counter, sizeof(counted), cudaMemcpyDeviceToHost, stream),
          "cudaMemcpyAsync");
    check(cudaStreamSynchronize(stream), "a check");
    return counted;
  }
};

ep_probe::ep_probe(device_id device, const symmetric_view& view, std::uint64_t barrier_offset)
    : state_(std::make_unique<state>()) {
  check(cudaSetDevice(device.value), "cudaSetDevice");
  state_->view = view;
  state_->barrier_offset = barrier_offset;
  check(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreate(&state_->begin), "cudaEventCreate");
  check(cudaEventCreate(&state_->end), "cudaEventCreate");
  check(cudaMalloc(&state_->flushed, k_flushed), "cudaMalloc");
  check(cudaMalloc(&state_->counter, sizeof(*state_->counter)), "cudaMalloc");
}

ep_probe::~ep_probe() {
  (void)cudaFree(state_->counter);
  (void)cudaFree(state_->flushed);
  (void)cudaEventDestroy(state_->end);
  (void)cudaEventDestroy(state_->begin);
  (void)cudaStreamDestroy(state_->stream);
}

native_stream ep_probe::stream() const {
  return state_->stream;
}

void ep_probe::prepare() {
  check(cudaMemsetAsync(state_->flushed, 0, k_flushed, state_->stream), "cudaMemsetAsync");
  barrier_kernel<<<1, 1, 0, state_->stream>>>(state_->view, state_->barrier_offset,
                                              ++state_->round);
  check(cudaGetLastError(), "barrier_kernel");
}

void ep_probe::begin() {
  check(cudaEventRecord(state_->begin, state_->stream), "cudaEventRecord");
}

double ep_probe::end() {
  check(cudaEventRecord(state_->end, state_->stream), "cudaEventRecord");
  check(cudaEventSynchronize(state_->end), "cudaEventSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, state_->begin, state_->end), "cudaEventElapsedTime");
  return ms * 1e-3;
}

void ep_probe::fill(void* at, std::size_t bytes, std::uint64_t seed) {
  fill_kernel<<<512, 256, 0, state_->stream>>>(static_cast<std::uint64_t*>(at), bytes / 8, seed);
  check(cudaGetLastError(), "fill_kernel");
}

std::size_t ep_probe::wrong_rows(const ep_rows& got, const ep_expected& expected) {
  return state_->count([&](unsigned long long* wrong) {
    wrong_rows_kernel<<<512, 256, 0, state_->stream>>>(state_->view, got, expected, wrong);
  });
}

void ep_probe::fill_results(void* y, const ep_expected& expected, std::size_t hidden) {
  fill_results_kernel<<<512, 256, 0, state_->stream>>>(static_cast<__nv_bfloat16*>(y), expected,
                                                       state_->view.rank, hidden);
  check(cudaGetLastError(), "fill_results_kernel");
}

std::size_t ep_probe::wrong_sums(const void* out, const std::uint64_t* masks, std::size_t tokens,
                                 std::size_t hidden) {
  if (tokens == 0) return 0;
  return state_->count([&](unsigned long long* wrong) {
    wrong_sums_kernel<<<static_cast<unsigned>(tokens), 256, 0, state_->stream>>>(
        static_cast<const __nv_bfloat16*>(out), masks, state_->view.rank, state_->view.ranks,
        hidden, wrong);
  });
}

}  // namespace evmm::bench
