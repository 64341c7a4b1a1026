// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <string>

namespace [[gnu::visibility("default")]] evmm {

/// "2.28.9" for 22809; the scheme changed with 2.9, when 2.8.4 was 2804.
std::string nccl_version_text(int code);
/// Numbers to compare: 22809 for "2.28.9"; 0 when it is no version.
int nccl_version_code(const std::string& text);

}  // namespace evmm
