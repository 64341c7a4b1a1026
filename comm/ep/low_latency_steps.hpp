// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <evmm/driver.hpp>

#include <memory>

namespace evmm::ep {

/// The steps of a low-latency exchange, enqueued on a stream; see ep_steps.hpp. `set` names the
/// buffers that a step uses, 0 or 1, which count their rounds apart.
class low_latency_steps {
 public:
  virtual ~low_latency_steps() = default;

  /// Stores the tokens' rows at their ranks and tells them; with `wait`, then waits until every
  /// living rank's are here.
  virtual void issue_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                              const token_arrays& from, const ep_totals& totals, bool wait,
                              native_stream stream) = 0;
  /// Waits; then copies them to the layout by expert when `to` is not null.
  virtual void wait_dispatch(int set, const ep_shape& shape, const low_latency_slot& slot,
                             const expert_layout* to, const ep_totals& totals,
                             native_stream stream) = 0;
  /// Tells the peers that this rank's combine buffer may be read.
  virtual void issue_combine(const ep_shape& shape, const low_latency_slot& slot,
                             native_stream stream) = 0;
  /// Waits until every living rank's may; loads each token's rows from there and sums them. With
  /// `tell`, does first what issue_combine() does.
  virtual void wait_combine(int set, const ep_shape& shape, const low_latency_slot& slot, int count,
                            const combine_output& to, const ep_totals& totals, bool tell,
                            native_stream stream) = 0;
};

std::unique_ptr<low_latency_steps> make_host_low_latency_steps(driver& on);
/// Throws unsupported in a build without CUDA.
std::unique_ptr<low_latency_steps> make_cuda_low_latency_steps(device_id device, int sms);

}  // namespace evmm::ep
