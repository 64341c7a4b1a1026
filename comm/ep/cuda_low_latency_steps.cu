// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/cuda_device.cuh"
#include "comm/ep/low_latency_kernel.cuh"
#include "comm/ep/low_latency_steps.hpp"

#include <algorithm>
#include <array>

namespace evmm::ep {

namespace {

constexpr int k_most_piece = 7168;  ///< bytes that leave room for all warps of a block

class cuda_low_latency_steps final : public low_latency_steps {
 public:
  cuda_low_latency_steps(int device, int sms)
      : device_(device),
        sms_(checked_sms(device, "sms", sms)),
        rounds_(static_cast<std::size_t>(4 * sms)) {
    for (const void* kernel : {reinterpret_cast<const void*>(&low_latency_dispatch_kernel),
                               reinterpret_cast<const void*>(&low_latency_arrange_kernel),
                               reinterpret_cast<const void*>(&low_latency_combine_kernel)}) {
      shared_ = allow_shared(device, kernel);
    }
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
    cudaLaunchConfig_t config{};
    config.gridDim = static_cast<unsigned>(shape.local_experts);
    config.blockDim = room.warps * 32;
    config.dynamicSmemBytes = room.bytes;
    config.stream = stream;
    // It is set up while the dispatch still runs.
    cudaLaunchAttribute early{};
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = 1;
    check_cuda(cudaLaunchKernelEx(&config, low_latency_arrange_kernel, shape, slot, *to, totals,
                                  static_cast<const std::uint64_t*>(rounds_of(set, 0))),
               "low_latency_arrange_kernel");
  }
  void issue_combine(int set, const ep_shape& shape, const low_latency_slot& slot,
                     const expert_layout& made, bool by_expert, int count, const combine_output* to,
                     const ep_totals& totals, native_stream stream) override {
    combine(set, shape, slot, made, by_expert, count, to == nullptr ? combine_output{} : *to,
            totals, {.issue = true, .wait = to != nullptr}, stream);
  }
  void wait_combine(int set, const ep_shape& shape, const low_latency_slot& slot,
                    const expert_layout& made, int count, const combine_output& to,
                    const ep_totals& totals, native_stream stream) override {
    combine(set, shape, slot, made, false, count, to, totals, {.issue = false, .wait = true},
            stream);
  }

 private:
  std::uint64_t* rounds_of(int set, int step) const {
    return rounds_.get() + (2 * set + step) * sms_;
  }
  void combine(int set, const ep_shape& shape, const low_latency_slot& slot,
               const expert_layout& made, bool by_expert, int count, const combine_output& to,
               const ep_totals& totals, low_latency_parts parts, native_stream stream) {
    const device_guard here(device_);
    const int row_bytes = shape.hidden * static_cast<int>(sizeof(__nv_bfloat16));
    const int warps = sms_ * k_returning_warps;
    // With few tokens, several warps share a row; about as many rows come as go.
    row_pieces pieces{1,
                      std::clamp(2 * warps / std::max(1, count), 1,
                                 (shape.hidden + k_elements_together - 1) / k_elements_together)};
    while (pieces.back < 16 &&
           (row_bytes / pieces.back > k_most_piece || count * slot.width * pieces.back < warps)) {
      pieces.back *= 2;
    }
    const rows_in_shared room(static_cast<std::size_t>(row_bytes / pieces.back), k_returning_warps,
                              shared_);
    low_latency_combine_kernel<<<sms_, room.warps * 32, room.bytes, stream>>>(
        shape, slot, made, by_expert, pieces, count, to, totals, rounds_of(set, 1), parts);
    check_cuda(cudaGetLastError(), "low_latency_combine_kernel");
  }

  int device_;
  int sms_;
  std::size_t shared_ = 0;
  device_words<std::uint64_t> rounds_;  ///< [set][dispatch, combine][block]
};

}  // namespace

std::unique_ptr<low_latency_steps> make_cuda_low_latency_steps(device_id device, int sms) {
  require_bulk_copies(device.value);
  const device_guard here(device.value);
  return std::make_unique<cuda_low_latency_steps>(device.value, sms);
}

}  // namespace evmm::ep
