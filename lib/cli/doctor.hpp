// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/cli/finding.hpp"
#include "lib/cli/machine.hpp"

#include <nlohmann/json.hpp>

#include <string>
#include <vector>

namespace evmm::cli {

/// One line of `evmm doctor`.
struct diagnosis {
  std::string check;  ///< a stable name, "open_files"
  std::string title;  ///< "open files (RLIMIT_NOFILE)"
  finding result;
};

/// Every check, in order. One that throws is a warning with what it threw.
std::vector<diagnosis> run_doctor(const machine& here);

/// The schema is in README.md.
nlohmann::ordered_json to_json(const std::vector<diagnosis>& all);
std::string to_text(const std::vector<diagnosis>& all);
/// 1 when something would stop a job, else 0.
int exit_code(const std::vector<diagnosis>& all);

}  // namespace evmm::cli
