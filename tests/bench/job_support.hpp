// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/bench/bench_support.hpp"
#include "tests/support/fault_driver.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/comm/nccl_communicator.hpp>
#include <evmm/comm/symmetric_region.hpp>

#include <functional>
#include <initializer_list>
#include <memory>
#include <string>

// Benchmarks that are jobs: every rank runs the same cases, rank 0 reports.

namespace evmm::bench {

/// One rank of a job.
struct job {
  std::shared_ptr<bootstrap> ranks;
  std::shared_ptr<test::fault_driver> on;  ///< nothing fails; it tells the time in driver calls
  device_id device{0};

  symmetric_region make(std::size_t reserve) const {
    return {ranks, on, {.device = device, .reserve = reserve, .cache_limit = 0}};
  }
  /// The largest of all ranks'.
  double slowest(double seconds) const;
  /// Skips the case, on all ranks, where `wrong` is not 0 on some; whether it did.
  bool refuse(benchmark::State& state, std::size_t wrong, const char* when) const;
};

/// The communicator of all cases, on the job's device and else as the first caller wants it; left
/// to the end of the process: to make one costs seconds. Where there can be none, the same
/// unsupported at every call.
nccl_communicator& shared_communicator(const job& at, nccl_options wanted = {});

/// Registers `body(state)`, run `rounds` times on every rank, with manual time in microseconds. An
/// error, which is the same on every rank, skips the case with its reason.
void add_case(const std::string& name, int rounds, std::function<void(benchmark::State&)> body);
/// Registers `body(state, at, bytes)` for each size: five rounds on every rank, manual time in
/// microseconds.
void add_case(const job& at, const std::string& name, std::initializer_list<std::size_t> sizes,
              const std::function<void(benchmark::State&, const job&, std::size_t)>& body);

/// Runs under mpirun the benchmarks that `add` registers. Rank 0 prints them by `table`, or as
/// Google Benchmark does.
int run_job(int argc, char** argv, void (*add)(const job& at),
            benchmark::BenchmarkReporter* table = nullptr);

}  // namespace evmm::bench
