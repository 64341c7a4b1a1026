// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <nlohmann/json.hpp>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace evmm::cli {

struct replay_options {
  std::vector<std::string> traces;  ///< files, see lib/allocator/trace_file.hpp
  std::string driver = {};          ///< "host", "cuda"; empty: as EVMM_DRIVER and the machine say
  /// Configuration, read on top of the environment's (parse_options).
  std::string config = {};
  int passes = 3;
  bool curves = false;  ///< record them, in a pass of their own
};

/// One pass over one trace. Peaks are those since the first pass began; everything else is of this
/// pass, or as it ended.
struct replay_pass {
  std::string trace;
  int pass = 0;
  std::size_t events = 0;  ///< allocations and frees
  double ns_per_event = 0;
  std::int64_t peak_allocated_bytes = 0;
  std::int64_t peak_reserved_bytes = 0;
  std::uint64_t driver_calls = 0;
  std::int64_t time_in_driver_calls_ns = 0;
  std::int64_t segments = 0;
  std::int64_t created_handles = 0;
  std::int64_t recycled_handles = 0;
  std::int64_t claimed_handles = 0;

  /// Of the peaks; 0 when nothing was allocated.
  double reserved_over_allocated() const;
};

/// What the allocator held while a trace ran through a new one, once. Each point is the most of
/// each quantity in a run of `events_a_point` events.
struct replay_curve {
  struct point {
    std::int64_t allocated = 0;
    std::int64_t active = 0;
    std::int64_t reserved = 0;
  };
  std::string trace;
  std::size_t events = 0;
  std::size_t events_a_point = 1;
  std::vector<point> points = {};
};

struct replay_report {
  std::vector<replay_pass> passes;
  std::vector<replay_curve> curves;  ///< one a trace when asked for, else empty
};

/// Replays each trace through a caching allocator of its own, on device 0. A trace's stream 0 is
/// the default stream, each other one a stream that is made for it. Completions of frees are left
/// out: the allocator works in stream order. A pass ends by freeing what is left, which is not
/// timed, so that the next one finds the allocator warm. On the host driver the device is large
/// enough for every trace unless EVMM_HOST_DEVICE_BYTES says otherwise. Errors name the trace and
/// the event.
replay_report replay(const replay_options& options);

/// An array with one object a pass; README.md has the keys.
nlohmann::ordered_json to_json(const replay_report& report);
std::string to_text(const replay_report& report);
/// An SVG document: allocated, active and reserved over the events, one panel a trace.
std::string draw(const std::vector<replay_curve>& curves);

}  // namespace evmm::cli
