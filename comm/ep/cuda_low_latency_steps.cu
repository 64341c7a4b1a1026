// SPDX-License-Identifier: Apache-2.0
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
        shared_(allow_shared(device, reinterpret_cast<const void*>(&low_latency_dispatch_kernel))),
        rounds_(static_cast<std::size_t>(4 * sms)) {}

  void issue_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                      const token_arrays& from, const ep_totals& totals, bool wait,
                      native_stream stream) override {
    enter();
    const std::size_t known = low_latency_shared::bytes(shape, from.count);
    const rows_in_shared room(shape.given_bytes(), k_low_latency_warps, shared_ - known);
    low_latency_dispatch_kernel<<<sms_, room.warps * 32, room.bytes + known, stream>>>(
        shape, slot, from, totals, rounds_of(set, 0), {.issue = true, .wait = wait});
    check_cuda(cudaGetLastError(), "low_latency_dispatch_kernel");
  }
  void wait_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                     const ep_totals& totals, native_stream stream) override {
    enter();
    low_latency_dispatch_kernel<<<1, ep_shape::most_ranks, 0, stream>>>(
        shape, slot, {}, totals, rounds_of(set, 0), {.issue = false, .wait = true});
    check_cuda(cudaGetLastError(), "low_latency_dispatch_kernel");
  }
  void issue_combine(int set, const ep_shape& shape, const low_latency_slot& slot,
                     const expert_layout& made, bool by_expert, int count, const combine_output* to,
                     const ep_totals& totals, native_stream stream) override {
    enter();
    low_latency_combine_kernel<<<sms_, k_returning_warps * 32, 0, stream>>>(
        shape, slot, made, by_expert, pieces(shape, slot, count), count,
        to == nullptr ? combine_output{} : *to, totals, rounds_of(set, 1),
        {.issue = true, .wait = to != nullptr});
    check_cuda(cudaGetLastError(), "low_latency_combine_kernel");
  }
  void wait_combine(int set, const ep_shape& shape, const low_latency_slot& slot,
                    const expert_layout& made, int count, const combine_output& to,
                    const ep_totals& totals, native_stream stream) override {
    enter();
    low_latency_combine_kernel<<<sms_, k_returning_warps * 32, 0, stream>>>(
        shape, slot, made, false, pieces(shape, slot, count), count, to, totals, rounds_of(set, 1),
        {.issue = false, .wait = true});
    check_cuda(cudaGetLastError(), "low_latency_combine_kernel");
  }

 private:
  void enter() const { check_cuda(cudaSetDevice(device_), "cudaSetDevice"); }
  std::uint64_t* rounds_of(int set, int step) const {
    return rounds_.get() + (2 * set + step) * sms_;
  }
  /// Warps that share a row, when about as many rows come as go.
  int pieces(const ep_shape& shape, const low_latency_slot& slot, int count) const {
    const int rows = std::max(1, count * slot.width);
    return std::clamp(2 * sms_ * k_returning_warps / rows, 1, (shape.hidden + 255) / 256);
  }

  int device_;
  int sms_;
  std::size_t shared_;
  device_words<std::uint64_t> rounds_;  ///< [set][dispatch, combine][block]
};

}  // namespace

std::unique_ptr<low_latency_steps> make_cuda_low_latency_steps(device_id device, int sms) {
  require_bulk_copies(device.value);
  return std::make_unique<cuda_low_latency_steps>(device.value, sms);
}

}  // namespace evmm::ep
