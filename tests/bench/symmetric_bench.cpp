// SPDX-License-Identifier: Apache-2.0
// What a collective change costs beside the driver calls that it makes, and beside taking the
// buffer down and building a larger one. Run under mpirun; every rank runs the same cases, rank 0
// reports the slowest rank.
#include "tests/bench/job_support.hpp"

#include <evmm/comm/symmetric_heap.hpp>
#include <evmm/units.hpp>

#include <optional>
#include <string>

namespace evmm::bench {
namespace {

using namespace evmm::units;

/// Times `change` on all ranks together: the slowest rank's time, and the most that any rank spent
/// inside driver calls.
template <class Change, class Undo>
void measure(benchmark::State& state, const job& at, std::size_t bytes, Change&& change,
             Undo&& undo) {
  double total = 0;
  double in_driver = 0;
  for (auto _ : state) {
    at.ranks->barrier("bench: start");
    at.on->clear_record();
    const double mine = seconds(change);
    const double driver = std::chrono::duration<double>(at.on->time_in_calls()).count();
    const double slowest = at.slowest(mine);
    total += slowest;
    in_driver += at.slowest(driver);
    state.SetIterationTime(slowest);
    undo();
  }
  count_bytes(state, bytes);
  state.counters["driver_us"] = in_driver / static_cast<double>(state.iterations()) * 1e6;
  state.counters["over_driver"] = total / in_driver;
}

void grow(benchmark::State& state, const job& at, tier kind, std::size_t bytes) {
  auto region = at.make(2 * bytes);
  region.grow(kind, 2_MiB);  // the first use of the host tier chooses its node
  measure(
      state, at, bytes, [&] { region.grow(kind, bytes); }, [&] { region.shrink(bytes); });
  region.close();
}

void migrate(benchmark::State& state, const job& at, std::size_t bytes) {
  symmetric_region region(at.ranks, at.on,
                          {.device = at.device, .reserve = bytes, .cache_limit = bytes});
  region.grow(tier::device, bytes);
  region.migrate(0, tier::host);
  region.migrate(0, tier::device);
  measure(
      state, at, bytes, [&] { region.migrate(0, tier::host); },
      [&] { region.migrate(0, tier::device); });
  region.close();
}

/// From `bytes` to twice that by closing the region and making a new one: contents are lost, and
/// every pointer changes. What programs do whose buffers cannot grow.
void rebuild(benchmark::State& state, const job& at, tier kind, std::size_t bytes) {
  std::optional<symmetric_region> region(at.make(2 * bytes));
  region->grow(kind, bytes);
  measure(
      state, at, bytes,
      [&] {
        region->close();
        region.emplace(at.make(2 * bytes));
        region->grow(kind, 2 * bytes);
      },
      [&] {
        region->close();
        region.emplace(at.make(2 * bytes));
        region->grow(kind, bytes);
      });
  region->close();
}

/// 16 segments become one.
void compact(benchmark::State& state, const job& at, std::size_t bytes) {
  auto region = at.make(2 * bytes);
  const auto build = [&] {
    for (int i = 0; i < 16; ++i) region.grow(tier::device, bytes / 16);
  };
  build();
  measure(
      state, at, bytes, [&] { region.compact(); },
      [&] {
        region.shrink(region.size());
        build();
      });
  region.close();
}

/// A block of the heap is freed and allocated again, on its stream or on two streams in turn, which
/// then wait for each other.
void heap_pair(benchmark::State& state, const job& at, bool two_streams) {
  symmetric_heap heap(at.make(1_GiB));
  const native_stream streams[] = {at.on->create_stream(at.device),
                                   at.on->create_stream(at.device)};
  std::size_t held = heap.allocate(1_MiB, streams[0]);
  std::size_t turn = 0;
  for (auto _ : state) {
    heap.free(held);
    turn = two_streams ? 1 - turn : 0;
    held = heap.allocate(1_MiB, streams[turn]);
  }
  heap.close();
  for (const native_stream stream : streams) at.on->destroy_stream(stream);
}

void add_cases(const job& at) {
  for (const tier kind : {tier::device, tier::host}) {
    const std::string suffix = "/" + to_string(kind);
    add_case(at, "symmetric/grow" + suffix, {64_MiB, 1_GiB},
             [kind](auto& state, const job& job_at, std::size_t bytes) {
               grow(state, job_at, kind, bytes);
             });
    add_case(at, "symmetric/rebuild" + suffix, {64_MiB, 1_GiB},
             [kind](auto& state, const job& job_at, std::size_t bytes) {
               rebuild(state, job_at, kind, bytes);
             });
  }
  add_case(at, "symmetric/migrate", {64_MiB}, migrate);
  add_case(at, "symmetric/compact", {1_GiB}, compact);
  for (const bool two_streams : {false, true}) {
    benchmark::RegisterBenchmark(
        two_streams ? "heap/pair_two_streams" : "heap/pair",
        [=](benchmark::State& state) { heap_pair(state, at, two_streams); })
        ->Iterations(20'000)  // the same on every rank
        ->UseRealTime();
  }
}

}  // namespace
}  // namespace evmm::bench

int main(int argc, char** argv) {
  return evmm::bench::run_job(argc, argv, evmm::bench::add_cases);
}
