// SPDX-License-Identifier: Apache-2.0
// Kernels that read and write memory through evmm's mappings, each beside the same memory mapped by
// hand: a mapping of evmm costs nothing at run time (target: 99% of plain).
#include "tests/bench/bench_support.hpp"

#include <string>

#if EVMM_BENCH_CUDA
#include "tests/bench/bandwidth_kernels.hpp"
#include "tests/bench/plain_mapping.hpp"

#include <evmm/address_range.hpp>
#include <evmm/elastic_region.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <array>
#endif

namespace evmm::bench {
namespace {

#if EVMM_BENCH_CUDA

using namespace evmm::units;

enum class direction { read, write };

// The two alternate, so that clocks and neighbours treat them alike. The time, and the bytes a
// second, are evmm's; `plain` is the other's rate and `of_plain` the quotient.
void compare(benchmark::State& state, bandwidth_probe& probe, direction way, address ours,
             address plain, std::size_t bytes) {
  const auto pass = [&](address at) {
    return way == direction::read ? probe.read(at, bytes) : probe.write(at, bytes);
  };
  probe.write(ours, bytes);
  probe.write(plain, bytes);
  double our_seconds = 0, plain_seconds = 0;
  for (auto _ : state) {
    const double took = pass(ours);
    plain_seconds += pass(plain);
    our_seconds += took;
    state.SetIterationTime(took);
  }
  count_bytes(state, bytes);
  state.counters["plain"] =
      static_cast<double>(bytes) * static_cast<double>(state.iterations()) / plain_seconds;
  state.counters["of_plain"] = plain_seconds / our_seconds;
}

// A region of four segments, as growth leaves it.
void own_memory(benchmark::State& state, const machine& here, tier kind, direction way,
                std::size_t bytes) {
  const auto where = kind == tier::device ? here.device_memory() : here.host_memory();
  here.need(where, 2 * bytes);
  bandwidth_probe probe(here.device.id);
  elastic_region region(here.on, {.device = here.device.id, .reserve = bytes});
  for (int i = 0; i < 4; ++i) region.grow(kind, bytes / 4);
  const std::array users = {here.device_memory()};
  const plain_mapping plain(where, bytes, users);
  compare(state, probe, way, reinterpret_cast<address>(region.data()), plain.base(), bytes);
}

// A peer's segment as a rank gets it: exported as a descriptor, imported and mapped.
void peer_memory(benchmark::State& state, const machine& here, direction way, std::size_t bytes) {
  const device_id peer{1};
  auto& on = *here.on;
  if (!on.can_access(here.device.id, peer)) throw unsupported("DEVICE 0 cannot access DEVICE 1");
  const allocation_request request = {.bytes = bytes, .where = memory_location::on(peer)};
  here.need(request.where, 2 * bytes);
  bandwidth_probe probe(here.device.id);
  const physical_memory owned(on, request);
  const auto shared = owned.export_fd();
  const auto imported = physical_memory::import_fd(on, shared.get(), request);
  const address_range range(on, bytes);
  const std::array access = {access_grant{.who = here.device_memory()}};
  const mapping mapped(on, range.base(), imported, access);
  const std::array users = {here.device_memory()};
  const plain_mapping plain(request.where, bytes, users);
  compare(state, probe, way, mapped.base(), plain.base(), bytes);
}

void add_cases(const machine& here) {
  for (const auto way : {direction::read, direction::write}) {
    const std::string name = way == direction::read ? "/read" : "/write";
    add("local/DEVICE" + name, {64_MiB, 1_GiB, 8_GiB},
        [&here, way](auto& state, std::size_t bytes) {
          own_memory(state, here, tier::device, way, bytes);
        });
    add("local/HOST_NUMA" + name, {64_MiB, 1_GiB}, [&here, way](auto& state, std::size_t bytes) {
      own_memory(state, here, tier::host, way, bytes);
    });
    add("peer/DEVICE" + name, {64_MiB, 1_GiB, 8_GiB}, [&here, way](auto& state, std::size_t bytes) {
      if (here.on->device_count() < 2) throw unsupported("needs two GPUs");
      peer_memory(state, here, way, bytes);
    });
  }
}

#endif

void add_all(const machine& here) {
#if EVMM_BENCH_CUDA
  if (here.cuda) return add_cases(here);
#endif
  (void)here;
  add("bandwidth", {0}, [](benchmark::State&, std::size_t) {
    throw unsupported("bandwidth is measured by kernels; here is no GPU, or no CUDA in this build");
  });
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run(argc, argv, evmm::bench::add_all);
}
