// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <evmm/driver.hpp>

#include <memory>

namespace evmm::ep {

/// The steps of an exchange, enqueued on a stream: kernels on a GPU, host functions on the host
/// driver. The rounds of each are counted where they run, so that a captured graph may be replayed.
class ep_steps {
 public:
  virtual ~ep_steps() = default;

  /// Works out where each token goes, tells the peers how many come, and learns the same from them:
  /// fills the plan and the totals. Also: this rank's receive buffers may be written from here on.
  virtual void plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
                    const ep_totals& totals, native_stream stream) = 0;
  /// The same from a plan that is full.
  virtual void plan_again(const ep_shape& shape, const plan_arrays& by, const ep_totals& totals,
                          native_stream stream) = 0;
  /// Behind a plan: stores rows, and what belongs to them, into the peers' receive buffers and
  /// waits for theirs. The CPU is told the totals, with `ticket`.
  virtual void send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
                    const ep_totals& totals, std::uint64_t ticket, native_stream stream) = 0;
  /// Loads each token's rows from the peers' combine buffers and sums them.
  virtual void combine(const ep_shape& shape, int count, const plan_arrays& by,
                       const combine_output& to, const ep_totals& totals, native_stream stream) = 0;

  /// Finds the place of each choice in the layout by expert.
  virtual void place(const ep_shape& shape, const expert_layout& to, native_stream stream) = 0;
  /// Copies the received rows there.
  virtual void permute(const ep_shape& shape, const expert_layout& to, native_stream stream) = 0;
  /// Sums what the experts made of each received row into its row of the combine buffer, times the
  /// choice's weight when `weighted`.
  virtual void unpermute(const ep_shape& shape, const expert_layout& from, bool weighted,
                         native_stream stream) = 0;
  /// The gradient of the weighted unpermute(): the rows of the combine buffer, times the weights,
  /// to the layout by expert; and, with what the experts had made (bf16 [expert rows][hidden], or
  /// null), the gradients of the weights.
  virtual void permute_gradients(const ep_shape& shape, const expert_layout& to,
                                 const void* outputs, native_stream stream) = 0;
};

std::unique_ptr<ep_steps> make_host_steps(driver& on);
/// `sms` multiprocessors of the device for what goes between ranks, `local_sms` (0: all of them)
/// for the rest. Throws unsupported in a build without CUDA.
std::unique_ptr<ep_steps> make_cuda_steps(device_id device, int sms, int local_sms, int experts);

}  // namespace evmm::ep
