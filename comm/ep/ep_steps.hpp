// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <evmm/driver.hpp>

#include <memory>

namespace evmm::ep {

/// Rounds of a send: that of the counts, and that of the rows.
struct send_rounds {
  std::uint64_t counts = 0;
  std::uint64_t rows = 0;
};

/// The steps of an exchange, enqueued on a stream: kernels on a GPU, host functions on the host
/// driver. A step of round n waits until all peers have come to theirs.
class ep_steps {
 public:
  virtual ~ep_steps() = default;

  /// Works out where each token goes, tells the peers how many come, and learns the same from them:
  /// fills the plan and the totals.
  virtual void plan(const ep_shape& shape, const token_arrays& from, const plan_arrays& to,
                    const ep_totals& totals, std::uint64_t round, native_stream stream) = 0;
  /// Stores rows (and, with ids, what belongs to them) into the peers' receive buffers, and waits
  /// for theirs. `met`: plan() of this stream has met the peers in this round; else it is done
  /// here.
  virtual void send(const ep_shape& shape, const token_arrays& from, const plan_arrays& by,
                    const ep_totals& totals, const send_rounds& rounds, bool met,
                    native_stream stream) = 0;
  /// Loads each token's rows from the peers' combine buffers and sums them.
  virtual void combine(const ep_shape& shape, int count, const plan_arrays& by, void* out,
                       const void* bias, const ep_totals& totals, std::uint64_t round,
                       native_stream stream) = 0;
};

std::unique_ptr<ep_steps> make_host_steps(driver& on);
/// `sms` multiprocessors of the device. Throws unsupported in a build without CUDA.
std::unique_ptr<ep_steps> make_cuda_steps(device_id device, int sms, int experts);

}  // namespace evmm::ep
