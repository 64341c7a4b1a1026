// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/bench_support.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <memory>
#include <string>

// Benchmarks that are jobs of several ranks under mpirun: every rank runs the same cases as often,
// rank 0 reports.

namespace evmm::bench {

/// One rank of a job.
struct job {
  std::shared_ptr<bootstrap> ranks;
  std::shared_ptr<driver> on;
  device_id device{0};

  /// The largest of what the ranks give. Collective.
  double slowest(double mine) const;
};

/// Registers `body(state)`, run `rounds` times on every rank, with manual time. What it throws, the
/// same on every rank, skips the case with its reason.
template <class Body>
void add_job_case(const std::string& name, int rounds, Body body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [body = std::move(body)](benchmark::State& state) mutable {
                                 try {
                                   body(state);
                                 } catch (const error& failure) {
                                   state.SkipWithError(failure.what());
                                 }
                               })
      ->Iterations(rounds)
      ->UseManualTime()
      ->Unit(benchmark::kMicrosecond);
}

/// Runs the benchmarks that `add` registers. Returns the program's exit code.
int run_job(int argc, char** argv, void (*add)(const job& at));

}  // namespace evmm::bench
