// SPDX-License-Identifier: Apache-2.0
// What NCCL windows cost: registering by handles and bytes, and growing a region with a window on
// it, step by step, beside taking everything down and building it larger. Run under mpirun.
#include "tests/bench/job_support.hpp"

#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/nccl_window.hpp>
#include <evmm/units.hpp>

#include <chrono>
#include <optional>
#include <string>

namespace evmm::bench {
namespace {

using namespace evmm::units;

nccl_communicator& communicator(const job& at) {
  return shared_communicator(at, {.window_bytes = 64_GiB});
}

double microseconds(std::chrono::nanoseconds time) {
  return std::chrono::duration<double, std::micro>(time).count();
}

/// Means over the iterations of the slowest rank's counters.
class counters {
 public:
  counters(benchmark::State& state, const job& at) : state_(state), at_(at) {}
  void add(const char* name, double microseconds) {
    state_.counters[name].value += at_.slowest(microseconds);
  }
  ~counters() {
    for (auto& [name, counter] : state_.counters) {
      counter.value /= static_cast<double>(state_.iterations());
    }
  }
  counters(const counters&) = delete;
  counters& operator=(const counters&) = delete;

 private:
  benchmark::State& state_;
  const job& at_;
};

/// Registering `bytes` in so many handles of each tier.
void registers(benchmark::State& state, const job& at, std::size_t bytes, int device_handles,
               int host_handles) {
  symmetric_region region(at.ranks, at.on,
                          {.device = at.device, .reserve = bytes, .max_segments = 64});
  const auto handles = static_cast<std::size_t>(device_handles + host_handles);
  for (int i = 0; i < device_handles; ++i) region.grow(tier::device, bytes / handles);
  for (int i = 0; i < host_handles; ++i) region.grow(tier::host, bytes / handles);
  nccl_communicator& on = communicator(at);
  const nccl_range whole{.kernels_only = true};
  { const nccl_window first(on, region, whole); }  // NCCL sets itself up at the first one
  {
    counters means(state, at);
    for (auto _ : state) {
      at.ranks->barrier("bench: start");
      std::optional<nccl_window> window;
      state.SetIterationTime(at.slowest(seconds([&] { window.emplace(on, region, whole); })));
      state.counters["windows"].value += static_cast<double>(window->pieces().size());
      means.add("deregister_us", 1e6 * seconds([&] { window.reset(); }));
    }
  }
  state.counters["handles"] = static_cast<double>(region.segments(region.rank()).size());
  count_bytes(state, bytes);
  region.close();
}

/// Where the time of a change went.
void add_steps(counters& means, const change_times& spent) {
  means.add("propose_us", microseconds(spent.propose));
  means.add("prepare_us", microseconds(spent.prepare));
  means.add("quiesce_us", microseconds(spent.quiesce));
  means.add("windows_down_us", microseconds(spent.take_down));
  means.add("exchange_map_us", microseconds(spent.map));
  means.add("windows_up_us", microseconds(spent.bring_up));
}

/// A live region of `bytes` with a window over all of it becomes 1 GiB larger.
void grows_live(benchmark::State& state, const job& at, std::size_t bytes) {
  nccl_communicator& on = communicator(at);
  auto region = at.make(bytes + 1_GiB);
  region.grow(tier::device, bytes);
  {
    const nccl_window window(on, region, {.kernels_only = true});
    counters means(state, at);
    for (auto _ : state) {
      at.ranks->barrier("bench: start");
      state.SetIterationTime(at.slowest(seconds([&] { region.grow(tier::device, 1_GiB); })));
      add_steps(means, region.last_change());
      region.shrink(1_GiB);
    }
  }
  count_bytes(state, 1_GiB);
  region.close();
}

/// The same by taking down the window and the region and building both larger: contents are lost,
/// and every pointer changes.
void rebuilds(benchmark::State& state, const job& at, std::size_t bytes) {
  nccl_communicator& on = communicator(at);
  std::optional<symmetric_region> region;
  std::optional<nccl_window> window;
  const auto build = [&](std::size_t size) {
    window.reset();
    if (region) region->close();
    region.emplace(at.make(bytes + 1_GiB));
    region->grow(tier::device, size);
    window.emplace(on, *region);
  };
  for (auto _ : state) {
    build(bytes);
    at.ranks->barrier("bench: start");
    state.SetIterationTime(at.slowest(seconds([&] { build(bytes + 1_GiB); })));
  }
  count_bytes(state, 1_GiB);
  window.reset();
  region->close();
}

void add_cases(const job& at) {
  for (const int handles : {1, 8, 32, 64}) {
    add_case(at, "nccl/register/DEVICE/handles:" + std::to_string(handles), {128_MiB, 1_GiB, 8_GiB},
             [handles](auto& state, const job& job_at, std::size_t bytes) {
               registers(state, job_at, bytes, handles, 0);
             });
  }
  add_case(at, "nccl/register/DEVICE+HOST_NUMA/handles:2", {128_MiB, 2_GiB, 8_GiB},
           [](auto& state, const job& job_at, std::size_t bytes) {
             registers(state, job_at, bytes, 1, 1);
           });
  add_case(at, "nccl/grow_live_by_1_GiB", {1_GiB, 16_GiB}, grows_live);
  add_case(at, "nccl/rebuild_1_GiB_larger", {1_GiB, 16_GiB}, rebuilds);
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run_job(argc, argv, evmm::bench::add_cases);
}
