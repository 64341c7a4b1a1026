// SPDX-License-Identifier: Apache-2.0
// The caching allocator: a hot pair, many live blocks, threads, recorded traces. The peers that are
// here go through the same cases.
#include "tests/bench/allocator_cases.hpp"
#include "tests/bench/allocator_peers.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/allocator/pinned_host_allocator.hpp>

#include <string>
#include <utility>

namespace evmm::bench {
namespace {

class evmm_subject {
 public:
  evmm_subject(const machine& here, unsigned streams, const allocator_options& options)
      : streams_(here, streams), allocator_(here.on, here.device.id, options) {}

  void* allocate(std::size_t bytes, unsigned stream) {
    return allocator_.allocate(bytes, streams_[stream]);
  }
  void free(void* at, unsigned) { allocator_.free(at); }

  void add_figures(benchmark::State& state) {
    const auto now = allocator_.statistics();
    set_peaks(state, now.allocated_bytes.all.peak, now.reserved_bytes.all.peak);
    state.counters["handles_created"] = static_cast<double>(now.num_device_alloc);
    state.counters["handles_recycled"] = static_cast<double>(now.handles_recycled);
  }

 private:
  stream_set streams_;  // outlives the allocator, which waits for them
  caching_allocator allocator_;
};

class pinned_subject {
 public:
  explicit pinned_subject(const machine& here) : allocator_(here.on, here.device.id) {}
  void* allocate(std::size_t bytes, unsigned) { return allocator_.allocate(bytes); }
  void free(void* at, unsigned) { allocator_.free(at); }

 private:
  pinned_host_allocator allocator_;
};

maker<evmm_subject> make_evmm(const machine& here, const allocator_options& options) {
  return [&here, options](unsigned streams) {
    return std::make_unique<evmm_subject>(here, streams, options);
  };
}

void add_all(const machine& here) {
  const auto all = load_traces();
  const auto options = options_from_environment();
  add_all_cases("evmm", make_evmm(here, options), all);

  // One handle a segment, as in PyTorch's default.
  const auto plain = make_evmm(here, parse_options("expandable_segments:False", options));
  add_pairs("evmm_segments", plain, k_pair_sizes);
  add_live("evmm_segments", plain);
  add_replays("evmm_segments", plain, all);

  add_pinned_pairs<pinned_subject>(
      "evmm", [&here](unsigned) { return std::make_unique<pinned_subject>(here); });

  add_host_peers(all);
#if EVMM_BENCH_CUDA
  if (here.cuda) add_cuda_allocator_peers(here, all);
#endif
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run(argc, argv, evmm::bench::add_all);
}
