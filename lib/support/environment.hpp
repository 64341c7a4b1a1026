// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <optional>
#include <string>

namespace [[gnu::visibility("default")]] evmm {

/// The value of an environment variable; nullopt when it is unset or empty.
std::optional<std::string> environment(const char* name);
/// The same as an integer in [least, most]. Throws invalid_argument naming the variable.
std::optional<long> environment_integer(const char* name, long least, long most);
/// The same as a size ("2G"). Throws invalid_argument naming the variable.
std::optional<std::size_t> environment_bytes(const char* name);

}  // namespace evmm
