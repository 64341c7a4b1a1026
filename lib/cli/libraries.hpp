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

/// The toolkit evmm was built with, and what the driver here supports.
std::string cuda_compiled();
library_versions look_for_nccl();
library_versions look_for_mpi();

}  // namespace evmm::cli
