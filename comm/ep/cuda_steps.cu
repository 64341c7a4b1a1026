// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/combine_kernel.cuh"
#include "comm/ep/ep_steps.hpp"
#include "comm/ep/plan_kernel.cuh"
#include "comm/ep/send_kernel.cuh"

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
  cuda_steps(device_id device, int sms, int experts) : device_(device.value) {
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
    if (sms > all) {
      throw invalid_argument("sms is " + std::to_string(sms) + ": DEVICE " +
                             std::to_string(device_) + " has " + std::to_string(all));
    }
    for (const void* kernel : {reinterpret_cast<const void*>(&send_kernel),
                               reinterpret_cast<const void*>(&combine_kernel),
                               reinterpret_cast<const void*>(&plan_kernel)}) {
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 static_cast<int>(shared_)),
            "cudaFuncSetAttribute");
    }
    const std::size_t counts = static_cast<std::size_t>(experts + 1) * sizeof(int);
    check(cudaMalloc(&counts_.chosen, counts), "cudaMalloc");
    counts_.blocks_done = counts_.chosen + experts;
    check(cudaMemset(counts_.chosen, 0, counts), "cudaMemset");
    check(cudaDeviceSynchronize(), "cudaMemset");
  }
  ~cuda_steps() override { (void)cudaFree(counts_.chosen); }

  void plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
            const ep_totals& totals, std::uint64_t round, native_stream stream) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const plan_shared room(shape, from.count, shared_);
    plan_kernel<<<1 + k_counting_blocks, k_plan_warps * 32, room.bytes, stream>>>(
        shape, from, to, totals, round, room.masks, counts_);
    check(cudaGetLastError(), "plan_kernel");
  }
  void send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
            const ep_totals& totals, const send_rounds& rounds, bool met,
            native_stream stream) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const std::size_t a_warp = shape.row_bytes + sizeof(std::uint64_t);
    const auto warps =
        static_cast<unsigned>(std::clamp<std::size_t>(shared_ / a_warp, 1, k_send_warps));
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(shape.blocks);
    config.blockDim = warps * 32;
    config.dynamicSmemBytes = warps * a_warp;
    config.stream = stream;
    // It starts while the plan is still made, and waits for it where it needs it.
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = met ? 1 : 0;
    check(cudaLaunchKernelEx(&config, send_kernel, shape, from, by, totals, rounds.counts,
                             rounds.rows, met),
          "send_kernel");
  }
  void combine(const ep_shape& shape, int count, const plan_arrays& by, void* out, const void* bias,
               const ep_totals& totals, std::uint64_t round, native_stream stream) override {
    check(cudaSetDevice(device_), "cudaSetDevice");
    const int chunk = combine_chunk(shape);
    const std::size_t stage = static_cast<std::size_t>(shape.ranks) *
                                  static_cast<std::size_t>(chunk) * sizeof(__nv_bfloat16) +
                              sizeof(std::uint64_t);
    const std::size_t fit = shared_ / stage;
    const std::size_t stages = std::clamp<std::size_t>(fit / k_combine_warps, 2, k_most_stages);
    const auto warps =
        static_cast<unsigned>(std::clamp<std::size_t>(fit / stages, 1, k_combine_warps));
    // With few tokens, several warps share one.
    const int chunks = (shape.hidden + chunk - 1) / chunk;
    const int pieces =
        std::clamp(shape.blocks * static_cast<int>(warps) / std::max(count, 1), 1, chunks);
    combine_kernel<<<shape.blocks, warps * 32, warps * stages * stage, stream>>>(
        shape, count, pieces, chunk, static_cast<int>(stages), by, static_cast<__nv_bfloat16*>(out),
        static_cast<const __nv_bfloat16*>(bias), totals, round);
    check(cudaGetLastError(), "combine_kernel");
  }

 private:
  int device_;
  std::size_t shared_ = 0;
  expert_counts counts_;
};

}  // namespace

std::unique_ptr<ep_steps> make_cuda_steps(device_id device, int sms, int experts) {
  return std::make_unique<cuda_steps>(device, sms, experts);
}

}  // namespace evmm::ep
