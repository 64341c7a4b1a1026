// SPDX-License-Identifier: Apache-2.0
// The user's kernels. All they know of evmm is symmetric_view.
#include "all_to_all.hpp"

#include <cuda_runtime.h>

namespace {

constexpr unsigned k_blocks = 24;
constexpr unsigned k_threads = 512;
constexpr unsigned k_blocks_a_source = 4;

/// 16 bytes, loaded and stored at once.
struct alignas(16) piece {
  std::uint64_t words[2];
};

// A warp a row.
__global__ void push_kernel(const __grid_constant__ evmm::symmetric_view view,
                            const __grid_constant__ all_to_all job) {
  auto* const counts = view.local<counters>(job.counts);
  const unsigned lane = threadIdx.x % 32;
  const unsigned warps = gridDim.x * blockDim.x / 32;
  for (unsigned token = (blockIdx.x * blockDim.x + threadIdx.x) / 32; token < job.tokens;
       token += warps) {
    const int to = destination(job.round, view.rank, token, view.ranks);
    unsigned slot = 0;
    if (lane == 0) slot = atomicAdd(&counts->sent[to], 1u);
    slot = __shfl_sync(0xffffffffu, slot, 0);
    const auto* from = view.local<piece>(job.own_row(token));
    // An ordinary address: the peer's memory, on its GPU or in its host's memory.
    auto* const row = view.peer<piece>(to, job.row(view.rank, slot));
    for (unsigned i = lane; i < job.words / 2; i += 32) {
      piece next = from[i];
      if (i == 0) next.words[0] = job.head(token);
      row[i] = next;
    }
  }

  // The last block to come here knows that all rows are stored. Each block's fence puts its rows
  // before its count, and the flag is stored with release at system scope: whoever sees it sees
  // the rows of all blocks.
  __shared__ bool last;
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence_system();
    last = atomicAdd(&counts->blocks_done, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!last) return;
  for (int to = static_cast<int>(threadIdx.x); to < view.ranks;
       to += static_cast<int>(blockDim.x)) {
    __threadfence_system();
    const unsigned rows = atomicAdd(&counts->sent[to], 0u);
    evmm::signal(view.peer<std::uint64_t>(to, job.flag(view, view.rank)), job.round << 32 | rows);
  }
}

// Several blocks a source, a warp a row.
__global__ void receive_kernel(const __grid_constant__ evmm::symmetric_view view,
                               const __grid_constant__ all_to_all job) {
  auto* const counts = view.local<counters>(job.counts);
  const auto source = static_cast<int>(blockIdx.x / k_blocks_a_source);
  const unsigned part = blockIdx.x % k_blocks_a_source;
  __shared__ std::uint64_t arrived;
  if (threadIdx.x == 0) {
    const auto* flag = view.local<std::uint64_t>(job.flag(view, source));
    const bool came = evmm::wait_signal(flag, job.round << 32, job.max_spins);
    arrived = came ? evmm::read_signal(flag) : 0;
    if (part == 0 && came) atomicAdd(&counts->received, static_cast<unsigned>(arrived));
    if (part == 0 && !came) atomicAdd(&counts->late, 1u);
  }
  __syncthreads();

  const auto rows = static_cast<unsigned>(arrived);
  const unsigned lane = threadIdx.x % 32;
  const unsigned warps = k_blocks_a_source * blockDim.x / 32;
  for (unsigned slot = (part * blockDim.x + threadIdx.x) / 32; slot < rows; slot += warps) {
    // What the user's next step would do: here, every word is compared.
    const auto* row = view.local<std::uint64_t>(job.row(source, slot));
    const auto token = static_cast<std::uint32_t>(row[0]);
    bool right = token < job.tokens && row[0] == job.head(token) &&
                 destination(job.round, source, token, view.ranks) == view.rank;
    for (unsigned i = 1 + lane; right && i < job.words; i += 32) {
      right = row[i] == word_of(source, token, i);
    }
    right = __all_sync(0xffffffffu, right);
    if (lane != 0) continue;
    if (right) {  // once: a second time is wrong
      auto* const seen =
          view.local<unsigned>(job.seen) + static_cast<std::size_t>(source) * job.tokens + token;
      right = atomicExch(seen, static_cast<unsigned>(job.round)) != job.round;
    }
    if (!right) atomicAdd(&counts->wrong, 1u);
  }
}

}  // namespace

const char* enqueue_kernels(const evmm::symmetric_view& view, const all_to_all& job, int device,
                            CUstream_st* stream) {
  if (const cudaError_t code = cudaSetDevice(device); code != cudaSuccess) {
    return cudaGetErrorString(code);
  }
  push_kernel<<<k_blocks, k_threads, 0, stream>>>(view, job);
  receive_kernel<<<static_cast<unsigned>(view.ranks) * k_blocks_a_source, k_threads, 0, stream>>>(
      view, job);
  const cudaError_t code = cudaGetLastError();
  return code == cudaSuccess ? nullptr : cudaGetErrorString(code);
}
