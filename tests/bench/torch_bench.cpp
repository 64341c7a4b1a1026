// SPDX-License-Identifier: Apache-2.0
// PyTorch's caching allocator through its C++ interface, in the cases of allocator_bench.cpp. Which
// kind of segments it uses is read by PyTorch itself when the process starts:
//
//   PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True evmm_bench_torch
//
// measures peer_torch_expandable; without it, peer_torch_native.
#include "tests/bench/allocator_cases.hpp"

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAFunctions.h>
#include <cstdlib>
#include <exception>
#include <string_view>

namespace evmm::bench {
namespace {

namespace torch_allocator = c10::cuda::CUDACachingAllocator;

class torch_subject {
 public:
  torch_subject(const machine& here, unsigned streams) : streams_(here, streams) {
    torch_allocator::resetPeakStats(0);
  }
  torch_subject(const torch_subject&) = delete;
  torch_subject& operator=(const torch_subject&) = delete;
  ~torch_subject() {
    // There is one allocator a process: the next case finds it empty.
    streams_.synchronize();
    torch_allocator::emptyCache();
  }

  void* allocate(std::size_t bytes, unsigned stream) {
    return torch_allocator::raw_alloc_with_stream(bytes, streams_[stream]);
  }
  void free(void* at, unsigned) { torch_allocator::raw_delete(at); }

  void add_figures(benchmark::State& state) {
    const auto now = torch_allocator::getDeviceStats(0);
    set_peaks(state, now.allocated_bytes[0].peak, now.reserved_bytes[0].peak);
  }

 private:
  stream_set streams_;
};

bool expandable() {
  for (const char* name : {"PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    const char* const set = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
    if (set != nullptr)
      return std::string_view(set).find("expandable_segments:True") != std::string_view::npos;
  }
  return false;
}

void add_all(const machine& here) {
  if (!here.cuda) throw unsupported("PyTorch's allocator needs a GPU; EVMM_DRIVER=host has none");
  c10::cuda::set_device(0);
  torch_allocator::init(1);
  add_all_cases<torch_subject>(
      expandable() ? "peer_torch_expandable" : "peer_torch_native",
      [&here](unsigned streams) { return std::make_unique<torch_subject>(here, streams); },
      load_traces());
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run(argc, argv, evmm::bench::add_all);
}
