// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/memory/copier.hpp"
#include "lib/memory/memory_source.hpp"
#include "lib/memory/part.hpp"

#include <evmm/driver.hpp>
#include <evmm/region.hpp>

#include <span>

// What elastic_region and symmetric_region share besides their mechanisms.

namespace [[gnu::visibility("default")]] evmm {

/// The limits of a region on this device, its reservation rounded up. Throws invalid_argument for
/// a reservation or segments of 0 bytes, max_segments outside 1 to 64, or a device that does not
/// exist.
segment_limits check_limits(driver& on, device_id device, std::size_t reserve,
                            std::size_t max_segments, std::size_t max_segment_bytes);

/// Access for the device, its peers, and for host memory the CPUs. Throws unsupported when a peer
/// cannot reach the device's memory.
access_rule region_access(driver& on, device_id device, std::span<const device_id> peers,
                          bool cpu_access);

/// A region's statistics: the counts it keeps, and what is held now.
region_statistics describe_statistics(const region_statistics& counts, const part& own,
                                      const memory_source& source, const copier& copies);

}  // namespace evmm
