// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/cuda_combine.cuh"
#include "comm/ep/cuda_device.cuh"
#include "comm/ep/low_latency_kernel.cuh"
#include "comm/ep/low_latency_steps.hpp"

#include <algorithm>
#include <array>

namespace evmm::ep {

namespace {

class cuda_low_latency_steps final : public low_latency_steps {
 public:
  cuda_low_latency_steps(int device, int sms)
      : device_(device),
        sms_(checked_sms(device, "sms", sms)),
        begins_early_(begins_early(device)),
        combine_shared_(allow_combine(device)),
        rounds_(static_cast<std::size_t>(4 * sms)) {
    for (const void* kernel : {reinterpret_cast<const void*>(&low_latency_dispatch_kernel),
                               reinterpret_cast<const void*>(&low_latency_arrange_kernel)}) {
      shared_ = allow_shared(device, kernel);
    }
    load_kernels({reinterpret_cast<const void*>(&low_latency_ready_kernel)});
  }

  void issue_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                      const token_arrays& from, const ep_totals& totals, bool wait,
                      native_stream stream) override {
    const device_guard here(device_);
    const std::size_t known = low_latency_shared::bytes(shape, from.count);
    const rows_in_shared room(shape.given_bytes(), k_low_latency_warps, shared_ - known);
    low_latency_dispatch_kernel<<<sms_, room.warps * 32, room.bytes + known, stream>>>(
        shape, slot, from, totals, rounds_of(set, 0), {.issue = true, .wait = wait});
    check_cuda(cudaGetLastError(), "low_latency_dispatch_kernel");
  }
  void wait_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                     const expert_layout* to, const ep_totals& totals,
                     native_stream stream) override {
    const device_guard here(device_);
    if (to == nullptr) {
      low_latency_dispatch_kernel<<<1, ep_shape::most_ranks, 0, stream>>>(
          shape, slot, {}, totals, rounds_of(set, 0), {.issue = false, .wait = true});
      check_cuda(cudaGetLastError(), "low_latency_dispatch_kernel");
      return;
    }
    const rows_in_shared room(shape.row_bytes, k_low_latency_warps, shared_);
    // It begins while the kernel before still runs, and waits for it where it needs it.
    const early_launch how(static_cast<unsigned>(shape.local_experts), room.warps * 32, room.bytes,
                           stream, begins_early_);
    check_cuda(cudaLaunchKernelEx(&how.config, low_latency_arrange_kernel, shape, slot, *to, totals,
                                  static_cast<const std::uint64_t*>(rounds_of(set, 0))),
               "low_latency_arrange_kernel");
  }
  void issue_combine(const ep_shape& shape, const low_latency_slot& slot,
                     native_stream stream) override {
    const device_guard here(device_);
    low_latency_ready_kernel<<<1, ep_shape::most_ranks, 0, stream>>>(shape, slot.dead);
    check_cuda(cudaGetLastError(), "low_latency_ready_kernel");
  }
  void wait_combine(int set, const ep_shape& shape, const low_latency_slot& slot, int count,
                    const combine_output& to, const ep_totals& totals, bool tell,
                    native_stream stream) override {
    launch_combine({device_, sms_, combine_shared_, rounds_of(set, 1)}, shape, count, slot.plan, to,
                   totals, {.dead = slot.dead, .tell = tell}, stream);
  }

 private:
  std::uint64_t* rounds_of(int set, int step) const {
    return rounds_.get() + (2 * set + step) * sms_;
  }
  int device_;
  int sms_;
  bool begins_early_;
  std::size_t shared_ = 0, combine_shared_;
  device_words<std::uint64_t> rounds_;  ///< [set][dispatch, combine][block]
};

}  // namespace

std::unique_ptr<low_latency_steps> make_cuda_low_latency_steps(device_id device, int sms) {
  require_kernels(device.value);
  const device_guard here(device.value);
  return std::make_unique<cuda_low_latency_steps>(device.value, sms);
}

}  // namespace evmm::ep
