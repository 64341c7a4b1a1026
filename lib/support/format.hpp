// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <string>
#include <string_view>

namespace [[gnu::visibility("default")]] evmm {

/// "512.0 MiB", "2.0 GiB", "17 B": as people say it.
std::string format_bytes(std::size_t bytes);
/// "0x7f12a4000000".
std::string format_address(address at);
/// The bytes of "2G", "512 MiB", "4096"; powers of two only. Throws invalid_argument naming `what`.
std::size_t parse_bytes(std::string_view text, std::string_view what);

}  // namespace evmm
