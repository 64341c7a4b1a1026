// SPDX-License-Identifier: Apache-2.0
#pragma once

// What runs on the device. Two implementations: CUDA kernels, and host functions for the host
// driver. Everything above is one code path that does not know which it has.

#include "arithmetic.hpp"
#include "plan.hpp"

#include <evmm/device/symmetric_view.cuh>
#include <evmm/driver.hpp>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>

namespace moe {

/// Offsets within each rank's part of the region. What precedes the rows must stay in the first
/// segment, which is DEVICE memory and never moves: flags are polled there.
struct region_layout {
  std::uint64_t flags = 0;   ///< a 64-bit word for each rank, for barriers; zero at first
  std::uint64_t counts = 0;  ///< ranks x experts 32-bit counts: row r is stored by rank r
  std::uint64_t rows = 0;    ///< received rows, packed

  static region_layout of(int ranks, int experts);
};

/// One step, as kernels take it: by value. Pointers lead into this rank's own workspace.
struct exchange_step {
  evmm::symmetric_view view;
  region_layout layout;
  std::uint32_t tokens = 0;   ///< of this rank
  std::uint32_t arrived = 0;  ///< rows that this rank receives
  int top_k = 0;
  int hidden = 0;  ///< a multiple of 8: rows are moved in pieces of 16 bytes
  int experts = 0;
  int first_expert = 0;  ///< of this rank
  int local_experts = 0;

  const bf16* x = nullptr;                       ///< tokens x hidden
  bf16* y = nullptr;                             ///< tokens x hidden
  const float* weights = nullptr;                ///< tokens x top_k
  const row_target* targets = nullptr;           ///< tokens x top_k
  const std::uint32_t* counts = nullptr;         ///< experts: this rank's rows for each
  const std::uint32_t* expert_starts = nullptr;  ///< local_experts + 1
  std::uint64_t* timed_out = nullptr;            ///< set when a barrier gave up

  EVMM_HOST_DEVICE std::uint64_t row_bytes() const {
    return static_cast<std::uint64_t>(hidden) * sizeof(bf16);
  }
  /// A row in the part of any rank: the plain pointer that stores and loads go through.
  EVMM_HOST_DEVICE char* row(row_target at) const {
    return view.peer(at.rank, layout.rows + at.row * row_bytes());
  }
  /// The expert of a received row; rows lie expert by expert.
  EVMM_HOST_DEVICE int expert_of(std::uint32_t row) const {
    int low = 0;
    int high = local_experts;  // expert_starts[low] <= row < expert_starts[high]
    while (high - low > 1) {
      const int middle = (low + high) / 2;
      (row < expert_starts[middle] ? high : low) = middle;
    }
    return first_expert + low;
  }
};

/// Each member enqueues on the stream it was made with and returns at once.
class exchange_ops {
 public:
  virtual ~exchange_ops() = default;

  /// Stores this rank's counts into its row of every rank's matrix.
  virtual void publish_counts(const exchange_step& step) = 0;
  /// Stores each token into the rows of its experts, wherever they are.
  virtual void dispatch(const exchange_step& step) = 0;
  /// Applies the stand-in experts to the received rows, in place.
  virtual void apply_experts(const exchange_step& step) = 0;
  /// Loads each token's rows from where they are and sums them by weight.
  virtual void combine(const exchange_step& step) = 0;
  /// Waits, in stream order, until all ranks have come as far; `round` is 1, 2, 3, ... It makes
  /// what each rank's stream wrote before it visible to all. After `patience` without a peer it
  /// gives up and sets step.timed_out, and later barriers return at once.
  virtual void barrier(const exchange_step& step, std::uint64_t round) = 0;
};

struct ops_options {
  evmm::device_id device;
  evmm::native_stream stream = nullptr;
  std::chrono::nanoseconds patience = std::chrono::seconds(30);
};

/// Host functions, run in stream order by driver::launch.
std::unique_ptr<exchange_ops> make_host_ops(std::shared_ptr<evmm::driver> on,
                                            const ops_options& options);
/// CUDA kernels on the same stream. Throws unsupported when built without CUDA.
std::unique_ptr<exchange_ops> make_cuda_ops(const ops_options& options);
/// Those that fit the driver.
std::unique_ptr<exchange_ops> make_ops(std::shared_ptr<evmm::driver> on,
                                       const ops_options& options);

}  // namespace moe
