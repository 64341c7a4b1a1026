// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/nccl_state.hpp"

#include <evmm/comm/nccl_window.hpp>
#include <evmm/region.hpp>

#include <cstddef>
#include <vector>

namespace evmm {

/// How a range is registered.
enum class nccl_kind : std::uint8_t {
  window,
  symmetric_window,  ///< NCCL_WIN_COLL_SYMMETRIC
  user_buffer,       ///< by ncclCommRegister, each rank for itself
};

/// One registration to be.
struct planned_piece {
  std::size_t offset = 0;  ///< from the region's base
  std::size_t bytes = 0;
  std::size_t taken = 0;  ///< bytes of the handles it touches, which NCCL maps whole
  bool same_span(const planned_piece& other) const {
    return offset == other.offset && bytes == other.bytes;
  }
};

/// Throws invalid_argument for a range that can never be registered.
void check_range(const nccl_range& range);

/// Whether several segments go into one window.
bool joins(const nccl_communicator::state& on, const nccl_range& range, nccl_kind kind);

/// Which pieces to register so that `range` is in them, from the segments of every rank: one piece
/// where several segments go into one window, else one for each. Each starts where a
/// segment does. The same on all ranks. Throws invalid_argument for a range that is not backed, and
/// unsupported for what this NCCL cannot register, which a rank's environment may forbid alone.
std::vector<planned_piece> plan_windows(const nccl_communicator::state& on, const nccl_range& range,
                                        nccl_kind kind,
                                        const std::vector<std::vector<segment>>& of_ranks);

}  // namespace evmm
