// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/table_kernels.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <string>
#include <vector>

namespace evmm::bench {

namespace {

constexpr std::size_t k_flushed = std::size_t{256} << 20;  // the L2 cache of an H200 has 50 MiB
constexpr int k_threads = 256;

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code), {}, code);
}

__device__ std::uint64_t mix(std::uint64_t z) {
  z = (z + 1) * 0x9e3779b97f4a7c15u;
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
  return z ^ (z >> 27);
}

/// Words of 16 bytes of row `row`.
__device__ ulonglong2 word_of(std::uint64_t row, std::uint64_t word) {
  const std::uint64_t value = mix(row << 12 | word);
  return {value, ~value};
}

__global__ void fill_kernel(const __grid_constant__ table_view view) {
  const std::uint64_t words = view.row_bytes / 16;
  const std::uint64_t first = static_cast<std::uint64_t>(view.rank) * view.rows_per_rank;
  const std::uint64_t end = min(first + view.rows_per_rank, view.rows);
  const std::uint64_t all = first < end ? (end - first) * words : 0;
  const std::uint64_t step = std::uint64_t{gridDim.x} * blockDim.x;
  for (std::uint64_t i = std::uint64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < all; i += step) {
    const std::uint64_t row = first + i / words;
    view.row<ulonglong2>(row)[i % words] = word_of(row, i % words);
  }
}

__global__ void draw_kernel(std::int64_t* to, std::size_t count, std::uint64_t rows,
                            const __grid_constant__ index_draw how, std::uint64_t seed) {
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    const std::uint64_t random = mix(seed << 40 ^ i);
    std::uint64_t rank = random % how.count;
    if (how.zipf > 0) {
      // The inverse of the distribution function, taken as continuous; then spread by a prime.
      const double u = static_cast<double>(random >> 11) * 0x1p-53;
      const double power = 1 - how.zipf;
      const double n = static_cast<double>(how.count);
      const double at = pow((pow(n, power) - 1) * u + 1, 1 / power) - 1;
      rank = min(static_cast<std::uint64_t>(at), how.count - 1) * 2147483647u % how.count;
    }
    to[i] = static_cast<std::int64_t>((how.first + rank) % rows);
  }
}

__global__ void count_kernel(std::int64_t* to, std::size_t count) {
  const std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x;
  if (i < count) to[i] = static_cast<std::int64_t>(i);
}

__global__ void plain_kernel(const __grid_constant__ table_view view, const std::int64_t* indices,
                             std::size_t count, uint4* out) {
  const std::uint32_t words = view.row_bytes / 16;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count * words;
       i += step) {
    const std::size_t place = i / words;
    out[i] =
        __ldcg(view.row<uint4>(static_cast<std::uint64_t>(indices[place])) + (i - place * words));
  }
}

__global__ void wrong_kernel(const __grid_constant__ table_view view, const std::int64_t* indices,
                             std::size_t count, const ulonglong2* out, unsigned long long* wrong) {
  const std::uint32_t words = view.row_bytes / 16;
  const std::size_t step = std::size_t{gridDim.x} * blockDim.x;
  for (std::size_t i = std::size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count * words;
       i += step) {
    const std::size_t place = i / words;
    const ulonglong2 expected =
        word_of(static_cast<std::uint64_t>(indices[place]), i - place * words);
    if (out[i].x != expected.x || out[i].y != expected.y) atomicAdd(wrong, 1ull);
  }
}

}  // namespace

struct table_probe::state {
  int sms = 0;
  cudaStream_t stream = nullptr;
  cudaEvent_t begin = nullptr, end = nullptr;
  void* flushed = nullptr;
  void* out = nullptr;
  std::int64_t* indices = nullptr;
  unsigned long long* counter = nullptr;
  std::vector<std::int64_t> on_host;

  unsigned blocks() const { return static_cast<unsigned>(sms) * (2048 / k_threads); }
};

table_probe::table_probe(device_id device, std::size_t most, std::size_t out_bytes)
    : state_(std::make_unique<state>()) {
  check(cudaSetDevice(device.value), "cudaSetDevice");
  check(cudaDeviceGetAttribute(&state_->sms, cudaDevAttrMultiProcessorCount, device.value),
        "cudaDeviceGetAttribute");
  check(cudaStreamCreateWithFlags(&state_->stream, cudaStreamNonBlocking), "cudaStreamCreate");
  check(cudaEventCreate(&state_->begin), "cudaEventCreate");
  check(cudaEventCreate(&state_->end), "cudaEventCreate");
  check(cudaMalloc(&state_->flushed, k_flushed), "cudaMalloc");
  check(cudaMalloc(&state_->out, out_bytes), "cudaMalloc");
  check(cudaMalloc(&state_->indices, most * sizeof(std::int64_t)), "cudaMalloc");
  check(cudaMalloc(&state_->counter, sizeof(*state_->counter)), "cudaMalloc");
}

table_probe::~table_probe() {
  (void)cudaFree(state_->counter);
  (void)cudaFree(state_->indices);
  (void)cudaFree(state_->out);
  (void)cudaFree(state_->flushed);
  (void)cudaEventDestroy(state_->end);
  (void)cudaEventDestroy(state_->begin);
  (void)cudaStreamDestroy(state_->stream);
}

native_stream table_probe::stream() const {
  return state_->stream;
}

void* table_probe::out() const {
  return state_->out;
}

void table_probe::fill(const table_view& view) {
  fill_kernel<<<state_->blocks(), k_threads, 0, state_->stream>>>(view);
  check(cudaGetLastError(), "fill_kernel");
  check(cudaStreamSynchronize(state_->stream), "fill_kernel");
}

std::span<const std::int64_t> table_probe::draw(const table_view& view, const index_draw& how,
                                                std::size_t count, std::uint64_t seed) {
  draw_kernel<<<state_->blocks(), k_threads, 0, state_->stream>>>(state_->indices, count, view.rows,
                                                                  how, seed);
  check(cudaGetLastError(), "draw_kernel");
  return {state_->indices, count};
}

std::span<const std::int64_t> table_probe::consecutive(std::size_t count) {
  count_kernel<<<static_cast<unsigned>((count + k_threads - 1) / k_threads), k_threads, 0,
                 state_->stream>>>(state_->indices, count);
  check(cudaGetLastError(), "count_kernel");
  return {state_->indices, count};
}

void table_probe::prepare(std::size_t out_bytes) {
  check(cudaMemsetAsync(state_->out, 0xee, out_bytes, state_->stream), "cudaMemsetAsync");
  check(cudaStreamSynchronize(state_->stream), "cudaStreamSynchronize");
}

void table_probe::begin() {
  check(cudaMemsetAsync(state_->flushed, 0, k_flushed, state_->stream), "cudaMemsetAsync");
  check(cudaEventRecord(state_->begin, state_->stream), "cudaEventRecord");
}

double table_probe::end() {
  check(cudaEventRecord(state_->end, state_->stream), "cudaEventRecord");
  check(cudaEventSynchronize(state_->end), "cudaEventSynchronize");
  float ms = 0;
  check(cudaEventElapsedTime(&ms, state_->begin, state_->end), "cudaEventElapsedTime");
  return ms * 1e-3;
}

std::size_t table_probe::wrong(const table_view& view, std::span<const std::int64_t> indices) {
  check(cudaMemsetAsync(state_->counter, 0, sizeof(*state_->counter), state_->stream),
        "cudaMemsetAsync");
  wrong_kernel<<<state_->blocks(), k_threads, 0, state_->stream>>>(
      view, indices.data(), indices.size(), static_cast<const ulonglong2*>(state_->out),
      state_->counter);
  check(cudaGetLastError(), "wrong_kernel");
  unsigned long long counted = 0;
  check(cudaMemcpyAsync(&counted, state_->counter, sizeof(counted), cudaMemcpyDeviceToHost,
                        state_->stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(state_->stream), "wrong_kernel");
  return counted;
}

void table_probe::plain(const table_view& view, std::span<const std::int64_t> indices) {
  plain_kernel<<<state_->blocks(), k_threads, 0, state_->stream>>>(
      view, indices.data(), indices.size(), static_cast<uint4*>(state_->out));
  check(cudaGetLastError(), "plain_kernel");
}

void table_probe::copies(const table_view& view, std::span<const std::int64_t> indices) {
  state_->on_host.resize(indices.size());
  check(cudaMemcpyAsync(state_->on_host.data(), indices.data(), indices.size_bytes(),
                        cudaMemcpyDeviceToHost, state_->stream),
        "cudaMemcpyAsync");
  check(cudaStreamSynchronize(state_->stream), "cudaMemcpyAsync");
  begin();  // the program that copies row by row has its indices on the host
  for (std::size_t i = 0; i < indices.size(); ++i) {
    check(cudaMemcpyAsync(static_cast<char*>(state_->out) + i * view.row_bytes,
                          view.row(static_cast<std::uint64_t>(state_->on_host[i])), view.row_bytes,
                          cudaMemcpyDefault, state_->stream),
          "cudaMemcpyAsync");
  }
}

}  // namespace evmm::bench
