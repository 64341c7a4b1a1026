// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>

// Bulk asynchronous copies (PTX cp.async.bulk): one thread moves kilobytes between global and
// shared memory. Sizes and addresses are multiples of 16. Before sm_90 there are none: there the
// thread copies at once, and what is left of the waits is that a warp's lanes see what others
// copied.

namespace evmm::ep {

#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900

__device__ __forceinline__ std::uint32_t shared_address(const void* at) {
  return static_cast<std::uint32_t>(__cvta_generic_to_shared(at));
}

/// A barrier in shared memory on which bulk loads are awaited, phase by phase.
__device__ __forceinline__ void barrier_init(std::uint64_t* barrier) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(barrier)) : "memory");
}
__device__ __forceinline__ void barrier_expect(std::uint64_t* barrier, std::uint32_t bytes) {
  asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)),
      "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void barrier_wait(std::uint64_t* barrier, std::uint32_t phase) {
  asm volatile(
      "{\n"
      ".reg .pred done;\n"
      "again:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@done bra over;\n"
      "bra again;\n"
      "over:\n"
      "}" ::"r"(shared_address(barrier)),
      "r"(phase)
      : "memory");
}

/// Global to shared memory; arrives on `barrier`, which expects the bytes.
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes,
                                          std::uint64_t* barrier) {
  asm volatile(
      "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
          "r"(shared_address(to)),
      "l"(from), "r"(bytes), "r"(shared_address(barrier))
      : "memory");
}
/// Shared to global memory, of any GPU or the host; part of the thread's current group.
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;" ::"l"(to),
               "r"(shared_address(from)), "r"(bytes)
               : "memory");
}
__device__ __forceinline__ void bulk_commit() {
  asm volatile("cp.async.bulk.commit_group;" ::: "memory");
}
/// Until this thread's stores have read their shared memory.
__device__ __forceinline__ void bulk_wait_read() {
  asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}
/// Until they are written.
__device__ __forceinline__ void bulk_wait_written() {
  asm volatile("cp.async.bulk.wait_group 0;" ::: "memory");
}
/// Orders what plain loads and stores did with what bulk copies do, both ways.
__device__ __forceinline__ void fence_bulk() {
  asm volatile("fence.proxy.async;" ::: "memory");
}

#else

__device__ __forceinline__ void barrier_init(std::uint64_t*) {}
__device__ __forceinline__ void barrier_expect(std::uint64_t*, std::uint32_t) {}
__device__ __forceinline__ void barrier_wait(std::uint64_t*, std::uint32_t) {
  __syncwarp();
}

/// Eight loads are under way at once.
__device__ __forceinline__ void copy_at_once(void* to, const void* from, std::uint32_t bytes) {
  constexpr std::uint32_t together = 8;
  const auto* const source = static_cast<const uint4*>(from);
  auto* const target = static_cast<uint4*>(to);
  const std::uint32_t count = bytes / sizeof(uint4);
  for (std::uint32_t first = 0; first < count; first += together) {
    uint4 words[together];
#pragma unroll
    for (std::uint32_t i = 0; i < together; ++i) {
      if (first + i < count) words[i] = source[first + i];
    }
#pragma unroll
    for (std::uint32_t i = 0; i < together; ++i) {
      if (first + i < count) target[first + i] = words[i];
    }
  }
}
__device__ __forceinline__ void bulk_load(void* to, const void* from, std::uint32_t bytes,
                                          std::uint64_t*) {
  copy_at_once(to, from, bytes);
}
__device__ __forceinline__ void bulk_store(void* to, const void* from, std::uint32_t bytes) {
  copy_at_once(to, from, bytes);
}
__device__ __forceinline__ void bulk_commit() {}
__device__ __forceinline__ void bulk_wait_read() {}
__device__ __forceinline__ void bulk_wait_written() {}
__device__ __forceinline__ void fence_bulk() {}

#endif

// A kernel that is launched early, as cuda_device.cuh's early_launch, begins while the one before
// it still runs.

/// From here on the next kernel may begin.
__device__ __forceinline__ void let_next_begin() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
/// Until the kernel before this one is over.
__device__ __forceinline__ void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace evmm::ep
