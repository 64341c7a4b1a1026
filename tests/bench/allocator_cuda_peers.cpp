// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/allocator_peers.hpp"

#include <cuda_runtime.h>

#include <cstdint>
#include <limits>

namespace evmm::bench {

namespace {

void check(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  (void)cudaGetLastError();
  const std::string message = std::string(call) + ": " + cudaGetErrorString(code);
  if (code == cudaErrorMemoryAllocation) throw out_of_memory(message);
  throw driver_error(message, {}, code);
}

class malloc_async_subject {
 public:
  malloc_async_subject(const machine& here, unsigned streams) : streams_(here, streams) {
    check(cudaDeviceGetDefaultMemPool(&pool_, here.device.id.value), "cudaDeviceGetDefaultMemPool");
    // Otherwise each synchronisation gives all that is free back.
    std::uint64_t keep = std::numeric_limits<std::uint64_t>::max();
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReleaseThreshold, &keep),
          "cudaMemPoolSetAttribute");
  }
  malloc_async_subject(const malloc_async_subject&) = delete;
  malloc_async_subject& operator=(const malloc_async_subject&) = delete;
  ~malloc_async_subject() {
    (void)cudaDeviceSynchronize();
    (void)cudaMemPoolTrimTo(pool_, 0);
  }

  void* allocate(std::size_t bytes, unsigned stream) {
    void* at = nullptr;
    check(cudaMallocAsync(&at, bytes, streams_[stream]), "cudaMallocAsync");
    return at;
  }
  void free(void* at, unsigned stream) {
    check(cudaFreeAsync(at, streams_[stream]), "cudaFreeAsync");
  }

  /// The pool's own high marks are since it exists, so they are set back at the end.
  void add_figures(benchmark::State& state) {
    std::uint64_t used = 0;
    std::uint64_t reserved = 0;
    check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrUsedMemHigh, &used), "UsedMemHigh");
    check(cudaMemPoolGetAttribute(pool_, cudaMemPoolAttrReservedMemHigh, &reserved),
          "ReservedMemHigh");
    set_peaks(state, static_cast<std::int64_t>(used), static_cast<std::int64_t>(reserved));
  }
  void forget_peaks() {
    std::uint64_t zero = 0;
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrUsedMemHigh, &zero), "UsedMemHigh");
    check(cudaMemPoolSetAttribute(pool_, cudaMemPoolAttrReservedMemHigh, &zero), "ReservedMemHigh");
  }

 private:
  stream_set streams_;
  cudaMemPool_t pool_ = nullptr;
};

class malloc_subject {
 public:
  void* allocate(std::size_t bytes, unsigned) {
    void* at = nullptr;
    check(cudaMalloc(&at, bytes), "cudaMalloc");
    return at;
  }
  void free(void* at, unsigned) { check(cudaFree(at), "cudaFree"); }
};

class host_alloc_subject {
 public:
  void* allocate(std::size_t bytes, unsigned) {
    void* at = nullptr;
    check(cudaHostAlloc(&at, bytes, cudaHostAllocDefault), "cudaHostAlloc");
    return at;
  }
  void free(void* at, unsigned) { check(cudaFreeHost(at), "cudaFreeHost"); }
};

}  // namespace

void add_cuda_allocator_peers(const machine& here, const traces& all) {
  check(cudaSetDevice(here.device.id.value), "cudaSetDevice");
  add_all_cases<malloc_async_subject>(
      "peer_cudaMallocAsync",
      [&here](unsigned streams) {
        auto made = std::make_unique<malloc_async_subject>(here, streams);
        made->forget_peaks();
        return made;
      },
      all);
  const maker<malloc_subject> plain = [](unsigned) { return std::make_unique<malloc_subject>(); };
  add_pairs("peer_cudaMalloc", plain, k_pair_sizes);
  add_live("peer_cudaMalloc", plain);
  add_pinned_pairs<host_alloc_subject>(
      "peer_cudaHostAlloc", [](unsigned) { return std::make_unique<host_alloc_subject>(); });
}

}  // namespace evmm::bench
