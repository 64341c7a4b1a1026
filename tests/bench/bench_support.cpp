// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/bench_support.hpp"

#include "lib/support/environment.hpp"
#include "lib/support/format.hpp"

#include <evmm/host_driver.hpp>
#include <evmm/topology.hpp>
#include <evmm/units.hpp>
#include <evmm/version.hpp>

#include <fmt/format.h>

#include <cstdio>
#include <exception>
#include <thread>

namespace evmm::bench {

using namespace evmm::units;

memory_location machine::host_memory() const {
  if (!node) throw unsupported(no_node);
  return memory_location::on(*node);
}

std::vector<access_grant> machine::access(memory_location where) const {
  std::vector<access_grant> grants = {{.who = device_memory()}};
  if (where.kind == tier::host) grants.push_back({.who = where});
  return grants;
}

void machine::need(memory_location where, std::size_t bytes) const {
  const auto free = on->usage(where).free_bytes;
  if (free >= bytes) return;
  throw out_of_memory(fmt::format("the case needs {} on {}, {} are free", format_bytes(bytes),
                                  to_string(where), format_bytes(free)));
}

void settle(const machine& here, std::size_t bytes) {
  if (!here.cuda || bytes < 1_GiB) return;
  std::this_thread::sleep_for(std::chrono::milliseconds(20 + 6 * (bytes / 1_GiB)));
}

machine find_machine() {
  machine here;
  const auto wanted = environment("EVMM_DRIVER");
  if (wanted == "host" || (!wanted && !cuda_available())) {
    auto options = host_driver_options::from_environment();
    if (!environment("EVMM_HOST_DEVICE_BYTES")) options.device_bytes = 256_GiB;
    if (!environment("EVMM_HOST_BYTES")) options.host_bytes = 256_GiB;
    here.on = host_driver::make(options);
  } else {
    here.on = make_driver();
  }
  here.cuda = here.on->info().kind == driver_kind::cuda;
  here.device = here.on->describe(device_id{0});
  try {
    here.node = choose_nodes(*here.on, topology::load(), here.device.id).nodes.front();
  } catch (const error& failure) {
    here.no_node = failure.what();
  }
  return here;
}

int run(int argc, char** argv, void (*add)(const machine& here)) try {
  // Before the user's, which therefore win.
  std::string repetitions = "--benchmark_repetitions=5";
  std::string aggregates = "--benchmark_display_aggregates_only=true";
  std::string least_time = "--benchmark_min_time=0.1";
  std::vector<char*> arguments = {argv[0], repetitions.data(), aggregates.data(),
                                  least_time.data()};
  arguments.insert(arguments.end(), argv + 1, argv + argc);
  int count = static_cast<int>(arguments.size());
  benchmark::Initialize(&count, arguments.data());
  if (benchmark::ReportUnrecognizedArguments(count, arguments.data())) return 1;

  const auto here = find_machine();
  const auto info = here.on->info();
  benchmark::AddCustomContext("evmm", EVMM_VERSION);
  benchmark::AddCustomContext("driver", fmt::format("{} {}", info.name, info.version));
  benchmark::AddCustomContext("device",
                              fmt::format("{} x {}, {}", here.on->device_count(), here.device.name,
                                          format_bytes(here.device.total_bytes)));
  benchmark::AddCustomContext("host tier",
                              here.node ? to_string(here.host_memory()) : here.no_node);
  add(here);
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
  return 0;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s: %s\n", argv[0], failure.what());
  return 1;
}

}  // namespace evmm::bench
