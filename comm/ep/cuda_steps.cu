// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/cuda_combine.cuh"
#include "comm/ep/cuda_device.cuh"
#include "comm/ep/ep_steps.hpp"
#include "comm/ep/permute_kernel.cuh"
#include "comm/ep/plan_kernel.cuh"
#include "comm/ep/send_kernel.cuh"

#include <algorithm>

namespace evmm::ep {

namespace {

constexpr int k_unpermute_blocks = 2;  ///< a multiprocessor

class cuda_steps final : public ep_steps {
 public:
  cuda_steps(int device, int sms, int local_sms, int experts)
      : device_(device),
        sms_(checked_sms(device, "sms", sms)),
        local_sms_(checked_sms(device, "local_sms", local_sms)),
        begins_early_(begins_early(device)),
        combine_shared_(allow_combine(device)),
        chosen_(static_cast<std::size_t>(experts + 1)),
        rounds_(static_cast<std::size_t>(1 + 2 * sms)) {
    for (const void* kernel :
         {reinterpret_cast<const void*>(&send_kernel), reinterpret_cast<const void*>(&plan_kernel),
          reinterpret_cast<const void*>(&permute_kernel)}) {
      shared_ = allow_shared(device, kernel);
    }
    load_kernels({reinterpret_cast<const void*>(&plan_again_kernel),
                  reinterpret_cast<const void*>(&place_kernel),
                  reinterpret_cast<const void*>(&unpermute_kernel),
                  reinterpret_cast<const void*>(&permute_gradients_kernel)});
  }

  void plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
            const ep_totals& totals, native_stream stream) override {
    const device_guard here(device_);
    const plan_shared room(shape, from.count, shared_);
    const expert_counts counts{chosen_.get(), chosen_.get() + shape.ranks * shape.local_experts};
    plan_kernel<<<1 + k_counting_blocks, k_plan_warps * 32, room.bytes, stream>>>(
        shape, from, to, totals, plan_rounds(), room.masks, counts);
    check_cuda(cudaGetLastError(), "plan_kernel");
  }
  void plan_again(const ep_shape& shape, const plan_arrays& by, const ep_totals& totals,
                  native_stream stream) override {
    const device_guard here(device_);
    plan_again_kernel<<<1, k_plan_warps * 32, 0, stream>>>(shape, by, totals, plan_rounds());
    check_cuda(cudaGetLastError(), "plan_again_kernel");
  }
  void send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
            const ep_totals& totals, std::uint64_t ticket, native_stream stream) override {
    const device_guard here(device_);
    const rows_in_shared room(shape.given_bytes(), k_send_warps, shared_);
    // It begins while the kernel before still runs, and waits for it where it needs it.
    const early_launch how(static_cast<unsigned>(sms_), room.warps * 32, room.bytes, stream,
                           begins_early_);
    check_cuda(cudaLaunchKernelEx(&how.config, send_kernel, shape, from, by, totals, send_rounds(),
                                  ticket),
               "send_kernel");
  }
  void combine(const ep_shape& shape, int count, const plan_arrays& by, const combine_output& to,
               const ep_totals& totals, native_stream stream) override {
    launch_combine({device_, sms_, combine_shared_, combine_rounds()}, shape, count, by, to, totals,
                   {}, stream);
  }

  void place(const ep_shape& shape, const expert_layout& to, native_stream stream) override {
    const device_guard here(device_);
    place_kernel<<<shape.local_experts, k_place_warps * 32, 0, stream>>>(shape, to);
    check_cuda(cudaGetLastError(), "place_kernel");
  }
  void permute(const ep_shape& shape, const expert_layout& to, native_stream stream) override {
    const device_guard here(device_);
    const rows_in_shared room(shape.row_bytes, k_permute_warps, shared_);
    permute_kernel<<<local_sms_, room.warps * 32, room.bytes, stream>>>(shape, to);
    check_cuda(cudaGetLastError(), "permute_kernel");
  }
  void unpermute(const ep_shape& shape, const expert_layout& from, bool weighted,
                 native_stream stream) override {
    const device_guard here(device_);
    // With few places, several warps share a row.
    const int warps = local_sms_ * k_unpermute_blocks * k_unpermute_warps;
    const int pieces = std::clamp(warps / from.rows.places(), 1, (shape.hidden + 255) / 256);
    unpermute_kernel<<<local_sms_ * k_unpermute_blocks, k_unpermute_warps * 32, 0, stream>>>(
        shape, from, pieces, weighted);
    check_cuda(cudaGetLastError(), "unpermute_kernel");
  }
  void permute_gradients(const ep_shape& shape, const expert_layout& to, const void* outputs,
                         native_stream stream) override {
    const device_guard here(device_);
    permute_gradients_kernel<<<local_sms_ * k_unpermute_blocks, k_unpermute_warps * 32, 0,
                               stream>>>(shape, to, static_cast<const __nv_bfloat16*>(outputs));
    check_cuda(cudaGetLastError(), "permute_gradients_kernel");
  }

 private:
  std::uint64_t* plan_rounds() const { return rounds_.get(); }
  std::uint64_t* send_rounds() const { return rounds_.get() + 1; }
  std::uint64_t* combine_rounds() const { return rounds_.get() + 1 + sms_; }

  int device_;
  int sms_;
  int local_sms_;
  bool begins_early_;
  std::size_t shared_ = 0, combine_shared_;
  device_words<int> chosen_;  ///< by plan_kernel, zero between plans
  device_words<std::uint64_t> rounds_;
};

}  // namespace

std::unique_ptr<ep_steps> make_cuda_steps(device_id device, int sms, int local_sms, int experts) {
  require_kernels(device.value);
  const device_guard here(device.value);
  return std::make_unique<cuda_steps>(device.value, sms, local_sms, experts);
}

}  // namespace evmm::ep
