// SPDX-License-Identifier: Apache-2.0
#include "exchange_ops.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

namespace moe {

namespace {

// Rows move in pieces of 16 bytes: what one thread loads or stores at once.
struct alignas(16) piece {
  static constexpr int width = 8;
  bf16 value[width];
};
static_assert(sizeof(piece) == 16);

// One block handles one token or one row; its threads stand side by side, so that each warp's
// access is 512 consecutive bytes.
constexpr int k_most_threads = 256;

__host__ __device__ int pieces_of(const exchange_step& step) {
  return step.hidden / piece::width;
}

__device__ __forceinline__ const piece* token(const exchange_step& step, const bf16* tokens,
                                              std::uint32_t t) {
  return reinterpret_cast<const piece*>(tokens + static_cast<std::size_t>(t) * step.hidden);
}

/// Through the read-only path, so that the load need not wait for stores to rows, which the
/// compiler could not tell apart from it.
__device__ __forceinline__ row_target load(const row_target* at) {
  static_assert(sizeof(row_target) == sizeof(int2));
  const int2 both = __ldg(reinterpret_cast<const int2*>(at));
  return {both.x, static_cast<std::uint32_t>(both.y)};
}

// One block a rank.
__global__ void publish_kernel(const __grid_constant__ exchange_step step) {
  const auto row = static_cast<std::uint64_t>(step.view.rank) * step.experts;
  auto* matrix = step.view.peer<std::uint32_t>(static_cast<int>(blockIdx.x), step.layout.counts);
  for (int e = threadIdx.x; e < step.experts; e += blockDim.x) matrix[row + e] = step.counts[e];
}

// One block a token: each piece is loaded once and stored top_k times.
__global__ void dispatch_kernel(const __grid_constant__ exchange_step step) {
  const std::uint32_t t = blockIdx.x;
  const piece* from = token(step, step.x, t);
  const row_target* targets = step.targets + static_cast<std::size_t>(t) * step.top_k;
  for (int p = threadIdx.x; p < pieces_of(step); p += blockDim.x) {
    const piece loaded = from[p];
    for (int k = 0; k < step.top_k; ++k) {
      reinterpret_cast<piece*>(step.row(load(targets + k)))[p] = loaded;
    }
  }
}

// One block a received row.
__global__ void expert_kernel(const __grid_constant__ exchange_step step) {
  const std::uint32_t row = blockIdx.x;
  const auto expert = stand_in_expert::of(step.expert_of(row));
  auto* pieces = reinterpret_cast<piece*>(step.row({step.view.rank, row}));
  for (int p = threadIdx.x; p < pieces_of(step); p += blockDim.x) {
    piece values = pieces[p];
#pragma unroll
    for (int i = 0; i < piece::width; ++i) values.value[i] = expert(values.value[i]);
    pieces[p] = values;
  }
}

// One block a token. The rows come from other GPUs, so several loads are under way before the
// first is needed; the sum is still taken in the order of the choices.
__global__ void combine_kernel(const __grid_constant__ exchange_step step) {
  constexpr int batch = 4;
  const std::uint32_t t = blockIdx.x;
  const auto first = static_cast<std::size_t>(t) * step.top_k;
  const row_target* targets = step.targets + first;
  const float* weights = step.weights + first;
  auto* to = const_cast<piece*>(token(step, step.y, t));
  for (int p = threadIdx.x; p < pieces_of(step); p += blockDim.x) {
    float sum[piece::width] = {};
    for (int k = 0; k < step.top_k; k += batch) {
      piece loaded[batch];
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (k + b < step.top_k) {
          loaded[b] = reinterpret_cast<const piece*>(step.row(load(targets + k + b)))[p];
        }
      }
#pragma unroll
      for (int b = 0; b < batch; ++b) {
        if (k + b < step.top_k) {
          const float weight = weights[k + b];
#pragma unroll
          for (int i = 0; i < piece::width; ++i) {
            sum[i] = accumulate(sum[i], weight, loaded[b].value[i]);
          }
        }
      }
    }
    piece made;
#pragma unroll
    for (int i = 0; i < piece::width; ++i) made.value[i] = to_bf16(sum[i]);
    to[p] = made;
  }
}

__device__ __forceinline__ std::uint64_t nanoseconds_now() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

// One thread. The stream's earlier kernels are over, the fence makes what they wrote visible to
// the other GPUs and CPUs before the flags are; later kernels of the stream start after the
// acquire. It spins in short turns, so that the clock is looked at and a lost peer ends the wait;
// to signal the same round again does no harm.
__global__ void barrier_kernel(const __grid_constant__ exchange_step step, std::uint64_t round,
                               std::uint64_t patience) {
  if (*step.timed_out != 0) return;
  __threadfence_system();
  constexpr std::uint64_t turns = 4096;
  const std::uint64_t start = nanoseconds_now();
  while (!evmm::barrier(step.view, step.layout.flags, round, turns)) {
    if (nanoseconds_now() - start >= patience) {
      *step.timed_out = round;
      return;
    }
  }
  __threadfence_system();
}

void check(cudaError_t result, const char* doing) {
  if (result == cudaSuccess) return;
  throw evmm::driver_error(std::string(doing) + ": " + cudaGetErrorString(result), {},
                           static_cast<int>(result));
}

class cuda_ops final : public exchange_ops {
 public:
  explicit cuda_ops(const ops_options& options) : options_(options) {
    // The runtime's kernels run in the primary context, which is also the driver's.
    check(cudaSetDevice(options.device.value), "cudaSetDevice");
  }

  void publish_counts(const exchange_step& step) override {
    publish_kernel<<<step.view.ranks, k_most_threads, 0, options_.stream>>>(step);
    check(cudaGetLastError(), "publish_counts");
  }

  void dispatch(const exchange_step& step) override {
    if (step.tokens == 0) return;
    dispatch_kernel<<<step.tokens, threads(step), 0, options_.stream>>>(step);
    check(cudaGetLastError(), "dispatch");
  }

  void apply_experts(const exchange_step& step) override {
    if (step.arrived == 0) return;
    expert_kernel<<<step.arrived, threads(step), 0, options_.stream>>>(step);
    check(cudaGetLastError(), "apply_experts");
  }

  void combine(const exchange_step& step) override {
    if (step.tokens == 0) return;
    combine_kernel<<<step.tokens, threads(step), 0, options_.stream>>>(step);
    check(cudaGetLastError(), "combine");
  }

  void barrier(const exchange_step& step, std::uint64_t round) override {
    barrier_kernel<<<1, 1, 0, options_.stream>>>(
        step, round, static_cast<std::uint64_t>(options_.patience.count()));
    check(cudaGetLastError(), "barrier");
  }

 private:
  /// A thread a piece, in whole warps, up to a block that still leaves several to each processor.
  static unsigned threads(const exchange_step& step) {
    const int warps = (pieces_of(step) + 31) / 32;
    return static_cast<unsigned>(std::min(warps * 32, k_most_threads));
  }

  ops_options options_;
};

}  // namespace

std::unique_ptr<exchange_ops> make_cuda_ops(const ops_options& options) {
  return std::make_unique<cuda_ops>(options);
}

}  // namespace moe
