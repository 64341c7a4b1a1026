// SPDX-License-Identifier: Apache-2.0
#include "grouped_gemm.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

namespace moe {

namespace {

constexpr int k_threads = 256;
constexpr int k_warp = 32;
constexpr unsigned k_whole_warp = 0xffffffff;
constexpr int k_warps = k_threads / k_warp;

/// The larger of two logits, or the lower id where they are equal.
__device__ __forceinline__ bool before(float a, int id_a, float b, int id_b) {
  return a > b || (a == b && id_a < id_b);
}

/// A warp a token. Lane l looks at experts l, l + 32, ...; in round k the largest that is left
/// becomes lane k's.
__global__ void __launch_bounds__(k_threads)
    choose_kernel(const __grid_constant__ routing_call call) {
  const std::size_t t = blockIdx.x * std::size_t{k_warps} + threadIdx.x / k_warp;
  if (t >= call.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % k_warp;
  const int experts = static_cast<int>(call.router.outputs);
  const int top_k = static_cast<int>(call.top_k);
  float* const logits = call.logits + t * experts;
  for (int e = lane; e < experts; e += k_warp) logits[e] += call.bias[e];
  float mine = -INFINITY;
  int my_id = -1;
  for (int k = 0; k < top_k; ++k) {
    float best = -INFINITY;
    int id = experts;
    for (int e = lane; e < experts; e += k_warp) {
      if (before(logits[e], e, best, id)) {
        best = logits[e];
        id = e;
      }
    }
    for (int step = k_warp / 2; step > 0; step /= 2) {
      const float other = __shfl_xor_sync(k_whole_warp, best, step);
      const int other_id = __shfl_xor_sync(k_whole_warp, id, step);
      if (before(other, other_id, best, id)) {
        best = other;
        id = other_id;
      }
    }
    if (lane == k) {
      mine = best;
      my_id = id;
    }
    // Only the lane that looks there reads it again.
    if (id % k_warp == lane && id < experts) logits[id] = -INFINITY;
  }
  const float largest = __shfl_sync(k_whole_warp, mine, 0);
  const float share = lane < top_k ? expf(mine - largest) : 0;
  float sum = share;
  for (int step = k_warp / 2; step > 0; step /= 2) sum += __shfl_xor_sync(k_whole_warp, sum, step);
  if (lane < top_k) {
    call.ids[t * top_k + lane] = my_id < experts ? my_id : -1;
    call.weights[t * top_k + lane] = share / sum;
  }
}

/// A warp a token.
__global__ void __launch_bounds__(k_threads)
    choose_backward_kernel(const __grid_constant__ routing_call call, const float* of_weights,
                           bf16* of_logits) {
  const std::size_t t = blockIdx.x * std::size_t{k_warps} + threadIdx.x / k_warp;
  if (t >= call.tokens) return;
  const int lane = static_cast<int>(threadIdx.x) % k_warp;
  const int experts = static_cast<int>(call.router.outputs);
  const int top_k = static_cast<int>(call.top_k);
  bf16* const to = of_logits + t * experts;
  for (int e = lane; e < experts; e += k_warp) to[e] = bf16{};
  const float weight = lane < top_k ? call.weights[t * top_k + lane] : 0;
  const float gradient = lane < top_k ? of_weights[t * top_k + lane] : 0;
  float mean = weight * gradient;
  for (int step = k_warp / 2; step > 0; step /= 2) {
    mean += __shfl_xor_sync(k_whole_warp, mean, step);
  }
  __syncwarp();  // the zeros of other lanes come first
  if (lane < top_k) {
    const std::int64_t id = call.ids[t * top_k + lane];
    if (id >= 0) to[id] = to_bf16(weight * (gradient - mean));
  }
}

__global__ void __launch_bounds__(k_threads)
    activate_kernel(std::size_t count, std::size_t width, const bf16* gate_up, bf16* out) {
  const std::size_t at = blockIdx.x * std::size_t{k_threads} + threadIdx.x;
  if (at >= count) return;
  const bf16* const gate = gate_up + at / width * 2 * width + at % width;
  out[at] = to_bf16(swiglu(to_float(gate[0]), to_float(gate[width])));
}

__global__ void __launch_bounds__(k_threads)
    activate_backward_kernel(std::size_t count, std::size_t width, const bf16* gate_up,
                             const bf16* of_out, bf16* of_gate_up) {
  const std::size_t at = blockIdx.x * std::size_t{k_threads} + threadIdx.x;
  if (at >= count) return;
  const std::size_t gate = at / width * 2 * width + at % width;
  const swiglu_gradients made = swiglu_backward(
      to_float(gate_up[gate]), to_float(gate_up[gate + width]), to_float(of_out[at]));
  of_gate_up[gate] = to_bf16(made.gate);
  of_gate_up[gate + width] = to_bf16(made.up);
}

void check(cudaError_t result, const char* doing) {
  if (result == cudaSuccess) return;
  throw evmm::driver_error(std::string(doing) + ": " + cudaGetErrorString(result), {},
                           static_cast<int>(result));
}

unsigned blocks_for(std::size_t work, int each) {
  return static_cast<unsigned>((work + static_cast<std::size_t>(each) - 1) /
                               static_cast<std::size_t>(each));
}

/// The runtime and cuBLAS work on the thread's device.
device_memory& on_its_device(device_memory& memory) {
  check(cudaSetDevice(memory.device.value), "cudaSetDevice");
  return memory;
}

class cuda_math final : public layer_math {
 public:
  explicit cuda_math(device_memory& memory) : memory_(on_its_device(memory)), gemm_(memory) {}

  std::string name() const override {
    return gemm_.in_one_call() ? "cuBLAS, grouped GEMM" : "cuBLAS, a GEMM an expert";
  }

  void route(const routing_call& call) override {
    if (call.tokens == 0) return;
    gemm_.forward_wide(call.tokens, call.router, call.x, call.logits);
    choose_kernel<<<blocks_for(call.tokens, k_warps), k_threads, 0, memory_.stream>>>(call);
    check(cudaGetLastError(), "choose_kernel");
  }

  void route_backward(const routing_call& call, const float* of_weights, bf16* of_logits) override {
    if (call.tokens == 0) return;
    choose_backward_kernel<<<blocks_for(call.tokens, k_warps), k_threads, 0, memory_.stream>>>(
        call, of_weights, of_logits);
    check(cudaGetLastError(), "choose_backward_kernel");
  }

  void forward(std::span<const row_group> groups, const grouped_linear& layer, const bf16* x,
               bf16* y) override {
    gemm_.forward(groups, layer, x, y);
  }

  void backward_inputs(std::span<const row_group> groups, const grouped_linear& layer,
                       const bf16* of_y, bf16* of_x, bool add) override {
    gemm_.backward_inputs(groups, layer, of_y, of_x, add);
  }

  void backward_weights(std::span<const row_group> groups, const grouped_linear& layer,
                        const bf16* of_y, const bf16* x, float* of_weights) override {
    gemm_.backward_weights(groups, layer, of_y, x, of_weights);
  }

  void activate(std::size_t rows, std::size_t width, const bf16* gate_up, bf16* out) override {
    const std::size_t count = rows * width;
    if (count == 0) return;
    activate_kernel<<<blocks_for(count, k_threads), k_threads, 0, memory_.stream>>>(count, width,
                                                                                    gate_up, out);
    check(cudaGetLastError(), "activate_kernel");
  }

  void activate_backward(std::size_t rows, std::size_t width, const bf16* gate_up,
                         const bf16* of_out, bf16* of_gate_up) override {
    const std::size_t count = rows * width;
    if (count == 0) return;
    activate_backward_kernel<<<blocks_for(count, k_threads), k_threads, 0, memory_.stream>>>(
        count, width, gate_up, of_out, of_gate_up);
    check(cudaGetLastError(), "activate_backward_kernel");
  }

 private:
  device_memory& memory_;
  grouped_gemm gemm_;
};

}  // namespace

std::unique_ptr<layer_math> make_cuda_math(device_memory& memory) {
  return std::make_unique<cuda_math>(memory);
}

}  // namespace moe
