// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/ep_job.hpp"
#include "tests/bench/ep_nccl_kernels.hpp"

#include <evmm/comm/nccl_communicator.hpp>

#include <string>

namespace evmm::bench {

/// Dispatch and combine as a program without evmm has them: NCCL's send and receive between all
/// pairs of ranks, with the permutation that they need, in memory of cudaMalloc.
///
/// What a router's output means for it is worked out once, on the CPU: who sends how many rows to
/// whom, and in which order. A program whose routing changes would have to do that, and tell the
/// counts to the CPUs of all ranks, in every step.
class nccl_exchange {
 public:
  /// Collective. Throws unsupported where NCCL cannot serve the ranks; the same at every call.
  nccl_exchange(const job& at, const ep_job& mine);

  /// Each token's row, and its scales, once to each rank that has an expert of it.
  void dispatch(native_stream stream);
  ep_rows received() const;
  void* received_rows() const { return received_.at(); }
  /// Where this rank writes what it made of its rows, bf16.
  void* results() const { return results_.at(); }
  /// The rows back to where they came from, and their sum with a weight each: 1, for results come
  /// with the experts' weights applied, as ep::exchange has it.
  void combine(native_stream stream);
  /// "NCCL 2.28.9".
  std::string version() const;

 private:
  /// `back`: from the receivers to the senders.
  void all_to_all(const void* from, void* to, std::size_t row_bytes, bool back,
                  native_stream stream);

  const ep_job& job_;
  int rank_;
  nccl_communicator& on_;
  send_order order_;
  cuda_array tokens_, slots_, weights_;
  cuda_array sent_, sent_scales_, received_, received_scales_, results_, returned_;
};

}  // namespace evmm::bench
