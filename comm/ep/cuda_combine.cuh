// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"

#include <evmm/driver.hpp>

#include <cstddef>

namespace evmm::ep {

/// How the ranks meet for a combine.
struct combine_meeting {
  /// Null: all meet before and after. Else a bit for each dead rank: they are left out, who does
  /// not come in time becomes one, and nobody meets afterwards.
  std::uint64_t* dead = nullptr;
  bool tell = true;  ///< that this rank is there, unless the peers have been told before
};

/// Where a device's combines run.
struct combine_place {
  int device;
  int sms;
  std::size_t shared;     ///< of a block, at most; see allow_combine()
  std::uint64_t* rounds;  ///< [sms]
};

/// Lets the kernel have shared memory, and returns how much.
std::size_t allow_combine(int device);
/// Sums the rows of `count` tokens where they lie in the ranks' combine buffers.
void launch_combine(const combine_place& where, const ep_shape& shape, int count,
                    const plan_arrays& by, const combine_output& to, const ep_totals& totals,
                    const combine_meeting& meeting, native_stream stream);

}  // namespace evmm::ep
