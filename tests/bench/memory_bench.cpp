// SPDX-License-Identifier: Apache-2.0
// The driver's steps one by one, and what the number of handles does to the time of growing.
#include "tests/bench/bench_support.hpp"
#include "tests/bench/cuda_peers.hpp"

#include <evmm/address_range.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <array>
#include <string>
#include <vector>

namespace evmm::bench {
namespace {

using namespace evmm::units;

// Create, map, set access, unmap and release one handle through the bare driver. The time is the
// sum; each step is a counter in seconds.
void steps(benchmark::State& state, const machine& here, memory_location where, std::size_t bytes) {
  here.need(where, bytes);
  auto& on = *here.on;
  const address_range range(on, bytes);
  const auto grants = here.access(where);
  std::array<double, 5> spent{};
  for (auto _ : state) {
    allocation_handle handle{};
    const std::array<double, 5> took = {
        seconds([&] { handle = on.create({.bytes = bytes, .where = where}); }),
        seconds([&] { on.map(range.base(), bytes, handle); }),
        seconds([&] { on.set_access(range.base(), bytes, grants); }),
        seconds([&] { on.unmap(range.base(), bytes); }),
        seconds([&] { on.release(handle); }),
    };
    double sum = 0;
    for (std::size_t i = 0; i < took.size(); ++i) {
      spent[i] += took[i];
      sum += took[i];
    }
    state.SetIterationTime(sum);
  }
  constexpr std::array names = {"create", "map", "set_access", "unmap", "release"};
  for (std::size_t i = 0; i < names.size(); ++i) {
    state.counters[names[i]] = benchmark::Counter(spent[i], benchmark::Counter::kAvgIterations);
  }
  count_bytes(state, bytes);
}

// The same for what evmm adds to it: physical_memory and mapping.
void owned(benchmark::State& state, const machine& here, memory_location where, std::size_t bytes) {
  here.need(where, bytes);
  auto& on = *here.on;
  const address_range range(on, bytes);
  const auto grants = here.access(where);
  for (auto _ : state) {
    state.SetIterationTime(seconds([&] {
      const physical_memory memory(on, {.bytes = bytes, .where = where});
      const mapping mapped(on, range.base(), memory, grants);
    }));
  }
  count_bytes(state, bytes);
}

// Backs `bytes` by handles of `handle_bytes`. Giving them back is not timed.
void grow(benchmark::State& state, const machine& here, std::size_t bytes, std::size_t handle_bytes,
          bool settled = true) {
  const auto where = here.device_memory();
  here.need(where, bytes);
  auto& on = *here.on;
  const address_range range(on, bytes);
  const auto grants = here.access(where);
  const std::size_t count = bytes / handle_bytes;
  std::vector<mapping> mapped;
  mapped.reserve(count);
  for (auto _ : state) {
    if (settled) settle(here, bytes);
    state.SetIterationTime(seconds([&] {
      for (std::size_t i = 0; i < count; ++i) {
        const physical_memory memory(on, {.bytes = handle_bytes, .where = where});
        mapped.emplace_back(on, range.base() + i * handle_bytes, memory, grants);
      }
    }));
    mapped.clear();
  }
  state.counters["handles"] = static_cast<double>(count);
  count_bytes(state, count * handle_bytes);
}

void add_all(const machine& here) {
  const auto add_tier = [&](const std::string& name, tier kind,
                            std::initializer_list<std::size_t> sizes) {
    const auto on_tier = [&here, kind](auto body) {
      return [&here, kind, body](benchmark::State& state, std::size_t bytes) {
        body(state, here, kind == tier::device ? here.device_memory() : here.host_memory(), bytes);
      };
    };
    add("steps/" + name, sizes, on_tier(steps));
    add("owned/" + name, sizes, on_tier(owned));
  };
  add_tier("DEVICE", tier::device, {2_MiB, 20_MiB, 256_MiB, 1_GiB, 16_GiB});
  add_tier("HOST_NUMA", tier::host, {2_MiB, 20_MiB, 256_MiB, 1_GiB, 4_GiB});

  const auto sizes = {1_GiB, 16_GiB, 64_GiB};
  add("grow/DEVICE/one_handle", sizes,
      [&here](benchmark::State& state, std::size_t bytes) { grow(state, here, bytes, bytes); });
  for (const std::size_t handles : {2, 4, 8, 16, 32}) {
    add("grow/DEVICE/" + std::to_string(handles) + "_handles", sizes,
        [&here, handles](benchmark::State& state, std::size_t bytes) {
          grow(state, here, bytes, bytes / handles);
        });
  }
  // What a GPU has not cleared since its release costs the more the fewer handles take it.
  for (const std::size_t handles : {1, 2, 4, 8, 16, 32}) {
    add("grow/DEVICE_just_released/" + std::to_string(handles) + "_handles", {64_GiB},
        [&here, handles](benchmark::State& state, std::size_t bytes) {
          grow(state, here, bytes, bytes / handles, false);
        });
  }
  add("grow/DEVICE/handles_of_2_MiB", sizes,
      [&here](benchmark::State& state, std::size_t bytes) { grow(state, here, bytes, 2_MiB); });
#if EVMM_BENCH_CUDA
  if (here.cuda) add_cuda_peers(here);
#endif
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run(argc, argv, evmm::bench::add_all);
}
