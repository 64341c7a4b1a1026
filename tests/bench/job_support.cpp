// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/job_support.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <utility>

namespace evmm::bench {

namespace {

constexpr int k_rounds = 5;

/// Ranks other than 0 run the cases and say nothing.
class silent : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

/// This rank's place on its machine, which may stand for several nodes.
int place_on_machine(const bootstrap& ranks) {
  const char* const place = std::getenv("OMPI_COMM_WORLD_LOCAL_RANK");
  return place != nullptr ? std::atoi(place) : ranks.node_rank();
}

}  // namespace

double job::slowest(double seconds) const {
  const auto all = ranks->all_gather_value(seconds, "bench: slowest");
  return *std::max_element(all.begin(), all.end());
}

bool job::refuse(benchmark::State& state, std::size_t wrong, const char* when) const {
  const double most = slowest(static_cast<double>(wrong));
  if (most == 0) return false;
  state.SkipWithError(
      fmt::format("{} rows or elements of a rank were wrong {}", most, when).c_str());
  return true;
}

nccl_communicator& shared_communicator(const job& at, nccl_options wanted) {
  static nccl_communicator* made = nullptr;
  static std::string why_not;
  if (!why_not.empty()) throw unsupported(why_not);
  if (made == nullptr) {
    try {
      wanted.device = at.device;
      made = new nccl_communicator(at.ranks, at.on, wanted);
    } catch (const error& failure) {
      why_not = fmt::format("no NCCL between these ranks: {}", failure.what());
      throw unsupported(why_not);
    }
  }
  return *made;
}

void add_case(const std::string& name, int rounds, std::function<void(benchmark::State&)> body) {
  benchmark::RegisterBenchmark(name.c_str(),
                               [body = std::move(body)](benchmark::State& state) {
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

void add_case(const job& at, const std::string& name, std::initializer_list<std::size_t> sizes,
              const std::function<void(benchmark::State&, const job&, std::size_t)>& body) {
  for (const std::size_t bytes : sizes) {
    add_case(name + "/bytes:" + std::to_string(bytes), k_rounds,
             [=](benchmark::State& state) { body(state, at, bytes); });
  }
}

int run_job(int argc, char** argv, void (*add)(const job& at),
            benchmark::BenchmarkReporter* table) try {
  const auto ranks = make_mpi_bootstrap();
  const machine here = find_machine();
  const job at{.ranks = ranks,
               .on = test::fault_driver::make(here.on),
               .device = {place_on_machine(*ranks) % here.on->device_count()}};
  if (ranks->rank() != rank_id{0}) {  // one rank writes the file
    argc = static_cast<int>(std::remove_if(argv, argv + argc,
                                           [](const char* argument) {
                                             return std::string_view(argument).starts_with(
                                                 "--benchmark_out");
                                           }) -
                            argv);
  }
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 2;
  benchmark::AddCustomContext("ranks", std::to_string(ranks->size()));
  benchmark::AddCustomContext("device", here.device.name);
  add(at);
  if (ranks->rank() == rank_id{0}) {
    benchmark::RunSpecifiedBenchmarks(table);
  } else {
    silent nobody;
    benchmark::RunSpecifiedBenchmarks(&nobody);
  }
  return 0;
} catch (const std::exception& failure) {
  std::fprintf(stderr, "%s: %s\n", argv[0], failure.what());
  return 1;
}

}  // namespace evmm::bench
