// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda_runtime.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <initializer_list>

// What the launches of kernels share.

namespace evmm::ep {

/// Throws driver_error.
void check_cuda(cudaError_t code, const char* call);
/// Sees that the kernels run on the device: throws unsupported below compute capability 8.0.
void require_kernels(int device);
/// Whether a kernel may begin while the one before it runs: from compute capability 9.0 on.
bool begins_early(int device);
/// `sms`, or all for 0. Throws invalid_argument naming the option when there are fewer.
int checked_sms(int device, const char* option, int sms);
/// Loads kernels now. At its first launch a kernel is loaded, which waits for the device: for ever,
/// when the device waits for messages whose thread the load holds up.
void load_kernels(std::initializer_list<const void*> kernels);
/// Dynamic shared memory that the kernels of `ep` may have in a block, and lets `kernel` have it.
std::size_t allow_shared(int device, const void* kernel);

/// Makes a device the thread's for a scope.
class device_guard {
 public:
  explicit device_guard(int device) {
    check_cuda(cudaGetDevice(&before_), "cudaGetDevice");
    if (before_ == device) return;
    check_cuda(cudaSetDevice(device), "cudaSetDevice");
    changed_ = true;
  }
  device_guard(const device_guard&) = delete;
  device_guard& operator=(const device_guard&) = delete;
  ~device_guard() {
    if (changed_) (void)cudaSetDevice(before_);
  }

 private:
  int before_ = 0;
  bool changed_ = false;
};

/// How a kernel is launched that begins while the one before it still runs, where the device can.
struct early_launch {
  cudaLaunchConfig_t config{};
  cudaLaunchAttribute early{};
  early_launch(unsigned blocks, unsigned threads, std::size_t shared, cudaStream_t stream,
               bool can) {
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream;
    early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    early.val.programmaticStreamSerializationAllowed = 1;
    config.attrs = &early;
    config.numAttrs = can ? 1 : 0;
  }
  early_launch(const early_launch&) = delete;
  early_launch& operator=(const early_launch&) = delete;
};

/// Memory of the thread's device, all zero at first.
template <class T>
class device_words {
 public:
  explicit device_words(std::size_t count) {
    check_cuda(cudaMalloc(&at_, count * sizeof(T)), "cudaMalloc");
    check_cuda(cudaMemset(at_, 0, count * sizeof(T)), "cudaMemset");
    check_cuda(cudaDeviceSynchronize(), "cudaMemset");
  }
  device_words(const device_words&) = delete;
  device_words& operator=(const device_words&) = delete;
  ~device_words() { (void)cudaFree(at_); }
  T* get() const { return at_; }

 private:
  T* at_ = nullptr;
};

/// Warps of a block that each hold a row in shared memory; see warp_row.
struct rows_in_shared {
  unsigned warps;
  std::size_t bytes;
  rows_in_shared(std::size_t row_bytes, std::size_t most_warps, std::size_t most_bytes) {
    const std::size_t a_warp = row_bytes + sizeof(std::uint64_t);
    warps = static_cast<unsigned>(std::clamp<std::size_t>(most_bytes / a_warp, 1, most_warps));
    bytes = warps * a_warp;
  }
};

}  // namespace evmm::ep
