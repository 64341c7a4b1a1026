// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/snapshot.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

// Snapshots that the tests write and read.

namespace evmm::test {

using namespace evmm::units;

inline std::vector<stack_frame> some_frames() {
  return {{"step", "/home/me/train.py", 42}, {"main", "/home/me/train.py", 7}, {"_start", "??", 0}};
}

inline native_stream stream_at(std::uintptr_t value) {
  return reinterpret_cast<native_stream>(value);  // NOLINT: never used as a stream
}

/// One of everything.
inline allocator_snapshot sample() {
  constexpr address base = 0x7f12a4000000;
  allocator_snapshot snapshot;
  snapshot.segments.push_back({.device = 0,
                               .at = base,
                               .total_bytes = 20_MiB,
                               .allocated_bytes = 2_MiB,
                               .active_bytes = 3_MiB,
                               .requested_bytes = 2000000,
                               .stream = nullptr,
                               .large = true,
                               .pool = {0, 1},
                               .expandable = true,
                               .where = tier::device,
                               .frames = some_frames(),
                               .blocks = {{.at = base,
                                           .bytes = 2_MiB,
                                           .requested_bytes = 2000000,
                                           .state = block_state::active_allocated,
                                           .frames = some_frames()},
                                          {.at = base + 2_MiB,
                                           .bytes = 1_MiB,
                                           .requested_bytes = 5,
                                           .state = block_state::active_pending_free},
                                          {.at = base + 3_MiB, .bytes = 17_MiB}}});
  snapshot.segments.push_back({.device = 1,
                               .at = 0x10000,
                               .total_bytes = 2_MiB,
                               .stream = stream_at(0xfedcba9876543210),
                               .where = tier::host,
                               .frames = {},
                               .blocks = {{.at = 0x10000, .bytes = 2_MiB}}});
  snapshot.device_traces.resize(3);
  std::int64_t time = 1767225600000000;
  for (const trace_action action :
       {trace_action::alloc, trace_action::free_requested, trace_action::free_completed,
        trace_action::segment_alloc, trace_action::segment_free, trace_action::segment_map,
        trace_action::segment_unmap, trace_action::snapshot, trace_action::oom,
        trace_action::annotate}) {
    snapshot.device_traces[0].push_back({.action = action,
                                         .device = 0,
                                         .at = base + 512,
                                         .bytes = 70000,
                                         .stream = stream_at(0x5581),
                                         .time_us = time++,
                                         .pool = {0, 300},
                                         .compile_context = "N/A",
                                         .user_metadata = "layer \"3\"\n\xc3\xa9",
                                         .frames = {}});
  }
  snapshot.device_traces[0].front().frames = some_frames();
  snapshot.device_traces[2].push_back({.device = 2,
                                       .at = std::numeric_limits<std::size_t>::max(),
                                       .bytes = 1_TiB,
                                       .time_us = -1,
                                       .frames = {{"step", "/home/me/train.py", 4294967295u}}});
  snapshot.external_annotations.push_back({1, time, {{"name", "epoch"}, {"stage", "START"}}});
  snapshot.settings = {{"PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"},
                       {"max_split_size", "134217728"},
                       {"garbage_collection_threshold", "0.8"},
                       {"expandable_segments", "True"},
                       {"pinned_num_register_threads", "8"},
                       {"release_lock_on_cudamalloc", "False"},
                       {"roundup_power2_divisions", "[1:0,2:4,4:-1]"},
                       {"recycle_handles", "ready"}};
  return snapshot;
}

inline std::string refusal(std::string_view bytes) {
  try {
    from_pickle(bytes);
  } catch (const invalid_argument& failure) {
    EXPECT_FALSE(failure.help().empty());
    return failure.what();
  }
  ADD_FAILURE() << "taken";
  return "";
}

/// Events of a training loop: 200 stacks of 30 frames.
inline allocator_snapshot large_snapshot(std::size_t events) {
  allocator_snapshot snapshot;
  std::vector<std::vector<stack_frame>> stacks(200);
  for (std::size_t i = 0; i < stacks.size(); ++i) {
    for (std::uint32_t depth = 0; depth < 30; ++depth) {
      const std::string number = std::to_string(depth < 5 ? i : depth);
      stacks[i].push_back({"at::native::some_rather_long_name_of_a_function_" + number,
                           "/opt/conda/lib/python3.11/site-packages/torch/nn/module_" + number,
                           depth});
    }
  }
  auto& trace = snapshot.device_traces.emplace_back();
  for (std::size_t i = 0; i < events; ++i) {
    trace.push_back({.action = i % 2 == 0 ? trace_action::alloc : trace_action::free_completed,
                     .at = 0x7f12a4000000 + 512 * (i % 5000),
                     .bytes = 512 * (i % 100),
                     .time_us = 1767225600000000 + static_cast<std::int64_t>(i),
                     .compile_context = "N/A",
                     .frames = stacks[i % stacks.size()]});
  }
  return snapshot;
}

}  // namespace evmm::test
