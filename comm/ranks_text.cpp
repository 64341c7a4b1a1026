// SPDX-License-Identifier: Apache-2.0
#include "comm/ranks_text.hpp"

#include <fmt/format.h>

namespace evmm {

std::string ranks_text(std::span<const int> ranks) {
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < ranks.size(); ++i) {
    if (i > 0) text += i + 1 == ranks.size() ? " and " : ", ";
    text += std::to_string(ranks[i]);
  }
  return text;
}

error_info not_arrived(std::string_view step, std::span<const int> missing,
                       std::chrono::milliseconds timeout) {
  return {fmt::format("{} did not arrive in {} within {:.1f} s", ranks_text(missing), step,
                      std::chrono::duration<double>(timeout).count()),
          "see why that happened there; EVMM_TIMEOUT_MS or set_timeout allows more time"};
}

}  // namespace evmm
