// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/options_values.hpp"

#include <evmm/allocator/options.hpp>

#include <optional>
#include <span>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] evmm {

/// One key of the configuration string.
struct option_key {
  std::string_view name;
  std::string_view allowed;  ///< completes "takes"
  void (*read)(allocator_options&, const option_value&);
  std::string (*write)(const allocator_options&);  ///< empty when there is nothing to say
};

/// All of them, in the order in which to_string writes them.
std::span<const option_key> option_keys();
/// Also by the names that PyTorch accepts for ROCm's sake; null when there is none.
const option_key* find_option_key(std::string_view name);

/// What is wrong with a set of options, by the keys that would mend it, the likeliest first.
struct option_fault {
  std::string_view key;
  std::string message;
  std::string_view other_key = {};
};
std::optional<option_fault> find_option_fault(const allocator_options& options);

}  // namespace evmm
