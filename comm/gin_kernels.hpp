// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/nccl_library.hpp"
#include "comm/put_plan.hpp"

#include <chrono>
#include <cstdint>
#include <memory>
#include <span>

namespace evmm {

// The part of GIN that needs nccl_device.h, and so nvcc: what NCCL lays out for kernels, and the
// kernel. Calls of NCCL return its result. Compiled, and read against NCCL's sources; not run yet,
// for want of a network that has GIN.

/// The NCCL whose nccl_device.h this was compiled with, 22809 for 2.28.9; 0 without any.
int gin_kernels_version() noexcept;

/// What NCCL says of a communicator's ranks.
struct gin_fabric {
  bool windows = false;   ///< every rank can have its memory in windows (deviceApiSupport)
  bool to_all = false;    ///< GIN leads from each rank to all
  bool on_rails = false;  ///< or at least to those with its index on other nodes
};
/// ncclCommQueryProperties. Local.
int look_for_gin(const nccl_api& api, ncclComm* comm, gin_fabric& found);

/// The kernel on one communicator.
class gin_kernels {
 public:
  gin_kernels() = default;
  gin_kernels(const gin_kernels&) = delete;
  gin_kernels& operator=(const gin_kernels&) = delete;
  virtual ~gin_kernels() = default;

  /// ncclDevCommCreate with the signals of put_steps, on all ranks together. NCCL may write into
  /// this object until the communicator is settled or gone.
  virtual int create(const nccl_api& api, ncclComm* comm, int ranks) = 0;
  /// ncclDevCommDestroy. Local; streams must be past the kernels.
  virtual int destroy(const nccl_api& api, ncclComm* comm) = 0;

  /// What a launch works with.
  struct target {
    ncclWindow_vidmem* window = nullptr;  ///< over the region; null when there is nothing to put
    std::uint64_t* late = nullptr;        ///< page-locked; 1 + the rank that was waited for in vain
    std::chrono::nanoseconds patience{0};
  };
  virtual void launch(std::span<const put_step> steps, const target& at, native_stream stream) = 0;
};
/// Loads the kernel on the thread's device: a first launch would wait for what is running.
std::unique_ptr<gin_kernels> make_gin_kernels();

}  // namespace evmm
