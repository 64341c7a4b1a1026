// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/ep_kernels.cuh"
#include "comm/ep/ep_steps.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>

#include <algorithm>
#include <string>

namespace evmm::ep {

namespace {

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code), {}, code);
}

/// Room for what the kernels declare themselves.
constexpr std::size_t k_static_shared = 1024;

class cuda_steps final : public ep_steps {
 public:
  cuda_steps(device_id device, int sms) : device_(device.value), sms_(sms) {
    check(cudaSetDevice(device_), "cudaSetDevice");
    int shared = 0;
    int all = 0;
    int major = 0;
    check(cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device_),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&all, cudaDevAttrMultiProcessorCount, device_),
          "cudaDeviceGetAttribute");
    check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, device_),
          "cudaDeviceGetAttribute");
    if (major < 9) {
      throw unsupported("the kernels of ep::exchange copy in bulk, which DEVICE " +
                            std::to_string(device_) + " (compute capability " +
                            std::to_string(major) + ") cannot",
                        "use a GPU of compute capability 9.0 or later");
    }
    shared_ = static_cast<std::size_t>(shared) - k_static_shared;
    sms_ = std::min(sms_, all);
    for (const void* kernel : {reinterpret_cast<const void*>(&send_kernel),
                               reinterpret_cast<const void*>(&combine_kernel)}) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_)),
            "cudaFuncSetAttribute");
    }
    check(cudaMalloc(&blocks_done_, sizeof(unsigned)), "cudaMalloc");
    check(cudaMemset(blocks_done_, 0, sizeof(unsigned)), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
  }
  ~cuda_steps() override { (void)cudaFree(blocks_done_); }

  void plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
            const ep_totals& totals, std::uint64_t round, native_stream stream) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const std::size_t words = static_cast<std::size_t>(shape.ranks) *
                              static_cast<std::size_t>(k_plan_warps + 2 + shape.local_experts);
    plan_kernel<<<1, k_plan_warps * 32, words * sizeof(std::int32_t), stream>>>(shape, from, to,
                                                                                totals, round);
    check(cudaGetLastError(), "plan_kernel");
  }
  void meet(const ep_shape& shape, const ep_totals& totals, std::uint64_t round,
            native_stream stream) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    meet_kernel<<<1, ep_shape::most_ranks, 0, stream>>>(shape, totals, round);
    check(cudaGetLastError(), "meet_kernel");
  }
  void send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
            const ep_totals& totals, std::uint64_t round, native_stream stream) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const std::size_t a_warp = shape.row_bytes + sizeof(std::uint64_t);
    const auto warps = static_cast<unsigned>(std::clamp<std::size_t>(shared_ / a_warp, 1, 16));
    send_kernel<<<sms_, warps * 32, warps * a_warp, stream>>>(shape, from, by, totals, round,
                                                              blocks_done_);
    check(cudaGetLastError(), "send_kernel");
  }
  void combine(const ep_shape& shape, int count, const plan_arrays& by, void* out, const void* bias,
               const ep_totals& totals, std::uint64_t round, native_stream stream) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const int chunk = combine_chunk(shape);
    const std::size_t a_warp =
        k_combine_stages * (static_cast<std::size_t>(shape.ranks) *
                                static_cast<std::size_t>(chunk) * sizeof(__nv_bfloat16) +
                            sizeof(std::uint64_t));
    const auto warps = static_cast<unsigned>(std::clamp<std::size_t>(shared_ / a_warp, 1, 16));
    combine_kernel<<<sms_, warps * 32, warps * a_warp, stream>>>(
        shape, count, chunk, by, static_cast<__nv_bfloat16*>(out),
        static_cast<const __nv_bfloat16*>(bias), totals, round, blocks_done_);
    check(cudaGetLastError(), "combine_kernel");
  }

 private:
  int device_;
  int sms_;
  std::size_t shared_ = 0;
  unsigned* blocks_done_ = nullptr;  ///< of the running kernel; 0 between kernels
};

}  // namespace

std::unique_ptr<ep_steps> make_cuda_steps(device_id device, int sms) {
  return std::make_unique<cuda_steps>(device, sms);
}

}  // namespace evmm::ep
