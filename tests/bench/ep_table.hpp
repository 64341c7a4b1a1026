// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <benchmark/benchmark.h>

#include <string>
#include <vector>

namespace evmm::bench {

/// Prints the EP cases as a table of their counters, and leaves everything else to the JSON.
class ep_table : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context& context) override;
  void ReportRuns(const std::vector<Run>& runs) override;

 private:
  std::string last_group_;
};

}  // namespace evmm::bench
