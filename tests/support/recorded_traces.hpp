// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

namespace evmm::test {

/// Allocation traces that are too large for the repository, by name: the *.csv.gz files of the
/// folder EVMM_TRACES, else of the first shared/traces in the repository or a folder above it.
/// Empty where there are none.
inline std::vector<std::string> recorded_traces() {
  namespace fs = std::filesystem;
  fs::path folder;
  if (const char* named = std::getenv("EVMM_TRACES")) {  // NOLINT(concurrency-mt-unsafe)
    folder = named;
  } else {
    for (fs::path above = EVMM_SOURCE_DIR; folder.empty(); above = above.parent_path()) {
      std::error_code ignored;
      if (fs::is_directory(above / "shared" / "traces", ignored)) folder = above / "shared/traces";
      if (above == above.parent_path()) break;
    }
  }
  std::vector<std::string> found;
  std::error_code ignored;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().string().ends_with(".csv.gz")) found.push_back(entry.path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

/// "mixtral_train" of ".../mixtral_train.csv.gz".
inline std::string trace_name(const std::string& path) {
  const std::string file = std::filesystem::path(path).filename().string();
  return file.substr(0, file.find('.'));
}

}  // namespace evmm::test
