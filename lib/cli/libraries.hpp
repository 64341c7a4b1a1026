// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace evmm::cli {

/// A library that evmm was built with, or that a program here would load. Empty: none.
struct library_versions {
  std::string compiled;
  std::string found;
  std::string path;     ///< of the one found
  std::string why_not;  ///< when none was found
};

/// "2.28.9" for 22809; the scheme changed with 2.9, when 2.8.4 was 2804.
std::string nccl_version_text(int code);
/// Numbers to compare: 22809 for "2.28.9"; 0 when it is no version.
int nccl_version_code(const std::string& text);

/// The toolkit evmm was built with, and what the driver here supports.
std::string cuda_compiled();
library_versions look_for_nccl();
library_versions look_for_mpi();

}  // namespace evmm::cli
