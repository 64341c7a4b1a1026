// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "record.hpp"

#include <cstdint>
#include <string>

namespace moe {

/// "70.0 MiB": powers of two.
std::string size_text(std::uint64_t bytes);

/// What a reader wants to know of the run, as tables.
std::string report(const run_record& run);

/// The last line: "verified: ..." when every output was right, else "FAILED: ...".
std::string verdict(const run_record& run);

/// The same numbers for programs.
std::string to_json(const run_record& run);

}  // namespace moe
