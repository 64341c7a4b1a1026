// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <optional>
#include <string>

namespace [[gnu::visibility("default")]] evmm {

/// The contents of a small file, such as those of /proc and /sys; nullopt when it cannot be read.
std::optional<std::string> read_text(const std::string& path);
/// Its first line without the newline.
std::optional<std::string> read_line(const std::string& path);

}  // namespace evmm
