// SPDX-License-Identifier: Apache-2.0
#include "lib/support/nccl_version.hpp"

#include <fmt/format.h>

#include <cstdio>

namespace evmm {

std::string nccl_version_text(int code) {
  const int major = code >= 10000 ? code / 10000 : code / 1000;
  const int minor = code >= 10000 ? code / 100 % 100 : code / 100 % 10;
  return fmt::format("{}.{}.{}", major, minor, code % 100);
}

int nccl_version_code(const std::string& text) {
  int major = 0;
  int minor = 0;
  int patch = 0;
  if (std::sscanf(text.c_str(), "%d.%d.%d", &major, &minor, &patch) < 2) return 0;
  return major * 10000 + minor * 100 + patch;
}

}  // namespace evmm
