// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace [[gnu::visibility("default")]] evmm {
namespace ep {

/// The job that an exchange is made for.
struct job_shape {
  int ranks = 1;  ///< in all: as many on each node
  int nodes = 1;
  /// symmetric_region::granularity().
  std::size_t granularity = std::size_t{2} << 20;
};

/// Memory of a symmetric heap that an object takes on each rank: its blocks and, where a buffer
/// lies in both tiers, the segments that are the buffer's own. (A region whose segments run short
/// rounds those up further; see symmetric_options::max_segments.)
struct heap_footprint {
  std::size_t device_bytes = 0;
  std::size_t host_bytes = 0;
  friend bool operator==(const heap_footprint&, const heap_footprint&) = default;
};

}  // namespace ep
}  // namespace evmm
