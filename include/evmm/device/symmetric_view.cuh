// SPDX-License-Identifier: Apache-2.0
#pragma once

// For kernels and host code alike: needs no library, only this header. C++17.

#include <cstddef>
#include <cstdint>

#include <sched.h>

#if defined(__CUDACC__)
#define EVMM_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define EVMM_HOST_DEVICE inline
#endif

namespace evmm {

/// What a kernel needs to know of a symmetric region: a plain struct, passed by value.
///
/// Ranks here are node ranks, 0 to `ranks` - 1: those whose memory plain loads and stores reach.
/// A view describes one epoch; after a change of the region take a new one.
struct symmetric_view {
  static constexpr int max_ranks = 72;  ///< an NVL72 domain
  static constexpr int max_segments = 64;

  char* base = nullptr;      ///< of node rank 0
  std::uint64_t stride = 0;  ///< bytes from one rank's base to the next
  std::uint64_t size = 0;    ///< backed bytes of each rank
  std::uint64_t epoch = 0;
  int rank = 0;  ///< this rank's node rank
  int ranks = 1;
  int segments = 0;
  /// End offset of each segment; the same on all ranks.
  std::uint64_t segment_end[max_segments] = {};
  /// By rank: bit s is set when segment s lies in host memory.
  std::uint64_t host_mask[max_ranks] = {};

  /// The object at `offset` of a rank's part.
  template <class T = char>
  EVMM_HOST_DEVICE T* peer(int of_rank, std::uint64_t offset = 0) const {
    return reinterpret_cast<T*>(base + static_cast<std::uint64_t>(of_rank) * stride + offset);
  }
  template <class T = char>
  EVMM_HOST_DEVICE T* local(std::uint64_t offset = 0) const {
    return peer<T>(rank, offset);
  }
  /// Index of the segment that holds `offset`; `segments` when it is beyond the end.
  EVMM_HOST_DEVICE int segment_of(std::uint64_t offset) const {
    int s = 0;
    while (s < segments && offset >= segment_end[s]) ++s;
    return s;
  }
  /// Whether the byte lies in host memory of that rank.
  EVMM_HOST_DEVICE bool on_host(int of_rank, std::uint64_t offset) const {
    return (host_mask[of_rank] >> segment_of(offset)) & 1u;
  }
};

// --- signals ------------------------------------------------------------------------------------
// A flag is a 64-bit word, 8-aligned, in memory that all parties map. DEVICE flags are the fast
// ones: 1.4 us a round trip over NVLink, 3.1 us through host memory (H200). All orders are system
// scope, so they hold between GPUs and CPUs.

/// Stores `value` after all earlier writes of this thread are visible to whoever sees it.
EVMM_HOST_DEVICE void signal(std::uint64_t* flag, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  __atomic_store_n(flag, value, __ATOMIC_RELEASE);
#endif
}

/// Adds `value` under the same order.
EVMM_HOST_DEVICE void signal_add(std::uint64_t* flag, std::uint64_t value) {
#if defined(__CUDA_ARCH__)
  asm volatile("red.release.sys.global.add.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
#else
  __atomic_fetch_add(flag, value, __ATOMIC_RELEASE);
#endif
}

/// Reads a flag; later reads of this thread see what was written before its signal.
EVMM_HOST_DEVICE std::uint64_t read_signal(const std::uint64_t* flag) {
#if defined(__CUDA_ARCH__)
  std::uint64_t value;
  asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
  return value;
#else
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
#endif
}

/// Lets another thread of the machine run while this one waits.
EVMM_HOST_DEVICE void relax() {
#if defined(__CUDA_ARCH__)
  __nanosleep(32);
#else
  sched_yield();  // ranks may share a core
#endif
}

/// Waits until the flag is at least `value`. False when `max_spins` reads did not see it (0: for
/// ever), so that a dead peer need not hang a kernel.
EVMM_HOST_DEVICE bool wait_signal(const std::uint64_t* flag, std::uint64_t value,
                                  std::uint64_t max_spins = 0) {
  for (std::uint64_t spins = 1; read_signal(flag) < value; ++spins) {
    if (max_spins != 0 && spins >= max_spins) return false;
    relax();
  }
  return true;
}

/// A barrier of all node ranks, called by one thread of each. `offset` names `view.ranks` flags in
/// the region, zero before the first use; `round` is 1, 2, 3, ... the same on all ranks. Writes of
/// the calling thread before it are visible to all ranks after it; a block that wrote with many
/// threads synchronises and fences (`__threadfence_system`) before the one thread calls.
EVMM_HOST_DEVICE bool barrier(const symmetric_view& view, std::uint64_t offset, std::uint64_t round,
                              std::uint64_t max_spins = 0) {
  for (int r = 0; r < view.ranks; ++r) {
    signal(view.peer<std::uint64_t>(r, offset) + view.rank, round);
  }
  bool all = true;
  for (int r = 0; r < view.ranks; ++r) {
    all = wait_signal(view.local<std::uint64_t>(offset) + r, round, max_spins) && all;
  }
  return all;
}

}  // namespace evmm
