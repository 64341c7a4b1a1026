// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "record.hpp"

#include <string>

namespace moe {

/// An SVG document: each rank's part of the region at each moment, its segments coloured by tier
/// and the rows in it; the spill of each step; and who sent how much to whom.
std::string draw(const run_record& run);

}  // namespace moe
