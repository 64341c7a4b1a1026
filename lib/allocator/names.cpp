// SPDX-License-Identifier: Apache-2.0
#include <evmm/allocator/snapshot.hpp>

namespace evmm {

const char* to_string(block_state state) noexcept {
  switch (state) {
    case block_state::active_allocated:
      return "active_allocated";
    case block_state::active_pending_free:
      return "active_pending_free";
    case block_state::inactive:
      return "inactive";
  }
  return "?";
}

const char* to_string(trace_action action) noexcept {
  switch (action) {
    case trace_action::alloc:
      return "alloc";
    case trace_action::free_requested:
      return "free_requested";
    case trace_action::free_completed:
      return "free_completed";
    case trace_action::segment_alloc:
      return "segment_alloc";
    case trace_action::segment_free:
      return "segment_free";
    case trace_action::segment_map:
      return "segment_map";
    case trace_action::segment_unmap:
      return "segment_unmap";
    case trace_action::snapshot:
      return "snapshot";
    case trace_action::oom:
      return "oom";
    case trace_action::annotate:
      return "annotate";
  }
  return "?";
}

}  // namespace evmm
