// SPDX-License-Identifier: Apache-2.0
// Compiles with the nccl_device.h of NCCL 2.28.7 and later. What older ones than 2.30.4 lack is
// left out here, and why_not(nccl_ability::gin) lets nobody run it with them.
#include "comm/gin_kernels.hpp"

#include <evmm/error.hpp>

#include <cuda_runtime.h>
#include <nccl.h>
// NCCL's headers and initialisers have warnings, and are not included as a system's.
#pragma GCC diagnostic ignored "-Wunused-parameter"
#pragma GCC diagnostic ignored "-Wmissing-field-initializers"
#include <nccl_device.h>

#include <algorithm>
#include <string>

namespace evmm {

namespace {

constexpr int k_steps = 64;  ///< of a launch, and threads of its block

struct batch {
  put_step steps[k_steps];
  int count;
  ncclWindow_t window;
  unsigned long long* late;
  std::uint64_t patience;  ///< nanoseconds
};
static_assert(sizeof(batch) + sizeof(ncclDevComm) <= 4096, "parameters of any kernel");

__device__ std::uint64_t now() {
  std::uint64_t time;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(time));
  return time;
}

/// Two ranks take the same context in both directions; each context has its own signals.
__device__ int context_with(const ncclDevComm& comm, int peer) {
  return (comm.rank + peer) % static_cast<int>(comm.ginContextCount);
}

/// Sees what was put before the signal; false when it was given up.
__device__ bool came(const ncclGin& gin, const batch& of, ncclGinSignal_t signal,
                     const put_step& step) {
  const std::uint64_t since = now();
  for (unsigned looks = 1;; ++looks) {
    if (gin.readSignal(signal) >= step.value) return true;
    if (looks % 1024 != 0) continue;
    if (*const_cast<volatile unsigned long long*>(of.late) != 0) return false;
    if (now() - since > of.patience) {
      atomicCAS_system(of.late, 0ull, 1ull + static_cast<unsigned long long>(step.peer));
      return false;
    }
  }
}

__device__ void put(const ncclGin& gin, const ncclDevComm& comm, ncclWindow_t window,
                    const put_step& step) {
  const ncclGin_SignalInc then{data_signal(comm.rank)};
#if NCCL_VERSION_CODE >= 23004
  // The region may have segments of both tiers.
  gin.put(ncclTeamWorld(comm), step.peer, window, step.to, window, step.from, step.bytes, then,
          ncclGin_None{}, ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread,
          cuda::thread_scope_system, ncclGinOptFlagsDefault, ncclGin_SegmentMixed{});
#else
  gin.put(ncclTeamWorld(comm), step.peer, window, step.to, window, step.from, step.bytes, then,
          ncclGin_None{}, ncclCoopThread{}, ncclGin_None{}, cuda::thread_scope_thread,
          cuda::thread_scope_system);
#endif
}

/// A thread a step. Steps lie in the order of put_plan; the block goes through the kinds together,
/// so that no thread spins beside one which has still to announce.
__global__ void __launch_bounds__(k_steps)
    carry_out_kernel(const __grid_constant__ ncclDevComm comm, const __grid_constant__ batch of) {
  using what = put_step::what;
  const int i = static_cast<int>(threadIdx.x);
  const bool mine = i < of.count;
  const put_step step = mine ? of.steps[i] : put_step{};
  const ncclGin gin{comm, context_with(comm, step.peer)};
  if (mine && step.kind == what::announce) {
    gin.signal(ncclTeamWorld(comm), step.peer, ncclGin_SignalInc{ready_signal(comm.rank)});
  }
  __syncthreads();
  const bool puts = mine && step.kind == what::put;
  if (puts && came(gin, of, ready_signal(step.peer), step)) put(gin, comm, of.window, step);
  if (__syncthreads_or(puts) != 0) {
    // Sources may be written anew.
    for (int c = 0; c < static_cast<int>(comm.ginContextCount); ++c) {
      ncclGin{comm, c}.flush(ncclCoopCta{});
    }
  }
  if (mine && step.kind == what::await) came(gin, of, data_signal(step.peer), step);
}

void check_cuda(cudaError_t code, const char* call) {
  if (code == cudaSuccess) return;
  throw driver_error(std::string(call) + ": " + cudaGetErrorString(code), {}, code);
}

ncclDevCommRequirements requirements(int ranks) {
#if NCCL_VERSION_CODE >= 23004
  ncclDevCommRequirements wanted = NCCL_DEV_COMM_REQUIREMENTS_INITIALIZER;
  wanted.ginConnectionType = NCCL_GIN_CONNECTION_FULL;
#else
  ncclDevCommRequirements wanted{};
  wanted.ginForceEnable = true;
#endif
#if NCCL_VERSION_CODE >= 23007
  wanted.ginVaSignalsRequired = false;
#endif
  wanted.ginSignalCount = put_signals(ranks);
  return wanted;
}

class kernels final : public gin_kernels {
 public:
  kernels() {
    cudaFuncAttributes loaded{};
    check_cuda(cudaFuncGetAttributes(&loaded, carry_out_kernel), "cudaFuncGetAttributes");
  }

  int create(const nccl_api& api, ncclComm* comm, int ranks) override {
    const ncclDevCommRequirements wanted = requirements(ranks);
    return api.device_comm_create(comm, &wanted, &comm_);
  }
  int destroy(const nccl_api& api, ncclComm* comm) override {
    return api.device_comm_destroy(comm, &comm_);
  }

  void launch(std::span<const put_step> steps, const target& at, native_stream stream) override {
    while (!steps.empty()) {
      const auto some = steps.first(std::min<std::size_t>(steps.size(), k_steps));
      batch next{.steps = {},
                 .count = static_cast<int>(some.size()),
                 .window = at.window,
                 .late = reinterpret_cast<unsigned long long*>(at.late),
                 .patience = static_cast<std::uint64_t>(at.patience.count())};
      std::copy(some.begin(), some.end(), next.steps);
      carry_out_kernel<<<1, k_steps, 0, stream>>>(comm_, next);
      check_cuda(cudaGetLastError(), "launch of puts");
      steps = steps.subspan(some.size());
    }
  }

 private:
  ncclDevComm comm_{};
};

}  // namespace

int gin_kernels_version() noexcept {
  return NCCL_VERSION_CODE;
}

int look_for_gin(const nccl_api& api, ncclComm* comm, gin_fabric& found) {
#if NCCL_VERSION_CODE >= 23004
  ncclCommProperties_t told = NCCL_COMM_PROPERTIES_INITIALIZER;
  const int result = api.query_properties(comm, &told);
  found = {.windows = told.deviceApiSupport,
           .to_all = told.ginType != NCCL_GIN_TYPE_NONE,
           .on_rails = told.railedGinType != NCCL_GIN_TYPE_NONE};
  return result;
#else
  (void)api, (void)comm, (void)found;
  return nccl_invalid_usage;
#endif
}

std::unique_ptr<gin_kernels> make_gin_kernels() {
  return std::make_unique<kernels>();
}

}  // namespace evmm
