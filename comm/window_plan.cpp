// SPDX-License-Identifier: Apache-2.0
#include "comm/window_plan.hpp"

#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <optional>

namespace evmm {

namespace {

std::size_t end_of(const segment& of) {
  return of.offset + of.bytes;
}

/// "segment 1 (2.0 MiB at 4.0 MiB)".
std::string name_of(const std::vector<segment>& segments, std::size_t index) {
  return fmt::format("segment {} ({} at {})", index, format_bytes(segments[index].bytes),
                     format_bytes(segments[index].offset));
}

/// The lowest rank of which segment `index` is so.
template <class Predicate>
std::optional<std::size_t> first_rank(const std::vector<std::vector<segment>>& of_ranks,
                                      std::size_t index, Predicate is_so) {
  for (std::size_t r = 0; r < of_ranks.size(); ++r) {
    if (is_so(of_ranks[r].at(index))) return r;
  }
  return std::nullopt;
}

}  // namespace

void check_range(const nccl_range& range) {
  if (range.offset > static_cast<std::size_t>(-1) - range.bytes) {
    throw invalid_argument(
        fmt::format("{} bytes at {} pass the end of addresses", range.bytes, range.offset));
  }
}

bool joins(const nccl_communicator::state& on, const nccl_range& range, nccl_kind kind) {
  return kind != nccl_kind::user_buffer && range.kernels_only &&
         on.why_not(nccl_ability::several_segments).empty();
}

std::vector<planned_piece> plan_windows(const nccl_communicator::state& on, const nccl_range& range,
                                        nccl_kind kind,
                                        const std::vector<std::vector<segment>>& of_ranks) {
  const std::vector<segment>& segments = of_ranks.front();
  const std::size_t size = segments.empty() ? 0 : end_of(segments.back());
  const std::size_t end = range.bytes == 0 ? size : range.offset + range.bytes;
  if (range.bytes == 0 && range.offset >= size) return {};
  if (end > size) {
    throw invalid_argument(
        fmt::format("the range of {} at {} ends past the {} that are backed",
                    format_bytes(range.bytes), format_bytes(range.offset), format_bytes(size)),
        "grow the region first");
  }
  const bool buffers = kind == nccl_kind::user_buffer;
  const bool joined = joins(on, range, kind);
  const auto host_ability = on.ranks->node_count() > 1 ? nccl_ability::host_segments_over_network
                                                       : nccl_ability::host_segments;
  std::vector<planned_piece> planned;
  for (std::size_t i = 0; i < segments.size() && segments[i].offset < end; ++i) {
    const segment& here = segments[i];
    if (end_of(here) <= range.offset) continue;
    if (first_rank(of_ranks, i,
                   [](const segment& of) { return of.state != segment_state::mapped; })) {
      throw invalid_argument(name_of(segments, i) + " is discarded: NCCL needs every byte mapped",
                             "restore() brings the memory and the window back");
    }
    if (const auto rank = first_rank(
            of_ranks, i, [](const segment& of) { return of.where.kind == tier::host; })) {
      if (range.device_only || buffers) continue;
      on.require(host_ability,
                 fmt::format("{} is HOST_NUMA on rank {}", name_of(segments, i), *rank));
    }
    const std::size_t bytes =
        std::min(end_of(here), round_up(end, nccl_window_alignment)) - here.offset;
    planned_piece* const last = planned.empty() ? nullptr : &planned.back();
    if (joined && last != nullptr && last->offset + last->bytes == here.offset) {
      last->bytes += bytes;
      last->taken += here.bytes;
    } else {
      planned.push_back({here.offset, bytes, here.bytes});
    }
  }
  return planned;
}

}  // namespace evmm
