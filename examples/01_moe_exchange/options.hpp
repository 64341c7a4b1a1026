// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

namespace moe {

struct options {
  std::string routing_file;  ///< empty: generate
  double skew = 1.0;
  int experts = 0;  ///< 0: as the file has, or 64 when generating
  int top_k = 4;    ///< when generating
  int steps = 4;
  std::size_t tokens = 0;  ///< of a rank in a step; 0: the routing is dealt out once
  int hidden = 2048;
  int repeat = 1;
  std::size_t device_cap = 0;  ///< most DEVICE bytes in a rank's part of the region; 0: no cap
  std::uint64_t seed = 1;
  std::string picture = "moe_exchange.svg";  ///< empty: none
  std::string json;                          ///< empty: none
};

/// What the command line asked for instead of a run: --help or a mistake.
struct early_exit {
  std::string text;
  int code = 0;
};

/// Fills `into`; a value when the program should print it and leave.
std::optional<early_exit> parse_options(int argc, const char* const* argv, options& into);

}  // namespace moe
