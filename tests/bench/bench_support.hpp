// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/error.hpp>

#include <benchmark/benchmark.h>

#include <chrono>
#include <cstddef>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace evmm::bench {

/// What is measured: the driver, its first device, and the node of that device's host tier.
struct machine {
  std::shared_ptr<driver> on;
  device_description device;
  std::optional<numa_node> node;  ///< empty when no node serves; `no_node` says why
  std::string no_node;
  bool cuda = false;

  memory_location device_memory() const { return memory_location::on(device.id); }
  /// Throws unsupported where there is no node.
  memory_location host_memory() const;
  /// Who may touch memory of `where`: the device, and for host memory the CPUs too.
  std::vector<access_grant> access(memory_location where) const;
  /// Throws out_of_memory, which skips the case, when `bytes` are not free there.
  void need(memory_location where, std::size_t bytes) const;
};

/// The driver that EVMM_DRIVER names. A host driver gets room for the largest case unless
/// EVMM_HOST_DEVICE_BYTES or EVMM_HOST_BYTES say otherwise, for its pages stay untouched.
machine find_machine();

/// Runs the benchmarks that `add` registers, with the machine in the JSON's context. Medians of
/// five repetitions unless the command line says otherwise.
int run(int argc, char** argv, void (*add)(const machine& here));

/// Waits until a GPU has cleared `bytes` that were just released, which it does in the background
/// at about 250 GB/s: whoever takes memory meanwhile waits for it. Does nothing on the host driver.
void settle(const machine& here, std::size_t bytes);

/// Seconds that `step` takes.
template <class Step>
double seconds(Step&& step) {
  const auto begin = std::chrono::steady_clock::now();
  step();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

/// Registers `body(state)`, whose argument is a size in bytes and whose time is manual. An error
/// skips the case with its reason.
template <class Body>
void add(const std::string& name, std::initializer_list<std::size_t> sizes, Body body) {
  auto* made = benchmark::RegisterBenchmark(
      name.c_str(), [body = std::move(body)](benchmark::State& state) mutable {
        try {
          body(state, static_cast<std::size_t>(state.range(0)));
        } catch (const error& failure) {
          state.SkipWithError(failure.what());
        }
      });
  made->UseManualTime()->Unit(benchmark::kMicrosecond)->ArgName("bytes");
  for (const auto size : sizes) made->Arg(static_cast<std::int64_t>(size));
}

/// Bytes that a case handled in all its iterations.
inline void count_bytes(benchmark::State& state, std::size_t bytes_an_iteration) {
  state.SetBytesProcessed(state.iterations() * static_cast<std::int64_t>(bytes_an_iteration));
}

}  // namespace evmm::bench
