// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace moe {

struct options {
  layer_shape shape = {.tokens = 0, .hidden = 0, .intermediate = 0, .experts = 0, .top_k = 4};
  int steps = 4;
  double skew = 1.5;
  double device_share = 0.5;
  std::uint64_t seed = 1;

  /// Sizes that were left at 0 become what runs in seconds: on a GPU, or on the CPU.
  void choose_sizes(bool on_gpu, int ranks);
};

/// What the command line asked for instead of a run: --help or a mistake.
struct early_exit {
  std::string text;
  int code = 0;
};

/// Fills `into`; a value when the program should print it and leave.
std::optional<early_exit> parse_options(int argc, const char* const* argv, options& into);

/// Throws invalid_argument for sizes that cannot be on so many ranks.
void check_sizes(const layer_shape& shape, int ranks);

}  // namespace moe
