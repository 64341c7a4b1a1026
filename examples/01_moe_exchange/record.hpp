// SPDX-License-Identifier: Apache-2.0
#pragma once

// What a run leaves behind: the same on every rank, read by the report and by the picture.

#include "plan.hpp"

#include <evmm/region.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace moe {

enum class phase : std::uint8_t { counts, dispatch, experts, combine };
constexpr std::array k_phases = {phase::counts, phase::dispatch, phase::experts, phase::combine};
const char* to_string(phase which);

/// The region after a step or a change.
struct moment {
  std::string label;
  std::uint64_t epoch = 0;
  std::size_t region_bytes = 0;                      ///< backed, of each rank
  std::vector<std::vector<evmm::segment>> segments;  ///< by rank
  std::vector<std::uint64_t> used;                   ///< by rank: end of the rows of the last step
};

/// Bytes a second are of one rank: the mean of what a rank moves, over the slowest rank's time.
/// Logical counts all rows; physical only those that leave their rank.
struct phase_rate {
  double seconds = 0;
  double logical = 0;
  double physical = 0;
};

struct step_record {
  int step = 0;
  std::uint64_t tokens = 0;
  std::uint64_t rows = 0;
  std::array<double, k_phases.size()> seconds = {};  ///< of the slowest rank
  traffic_matrix traffic{0};                         ///< of dispatch; combine goes the other way
  std::uint64_t mismatches = 0;                      ///< elements, over all ranks

  phase_rate rate(phase which) const;
};

/// A change of the region between steps, and what combining the same rows again then gave.
struct change_record {
  std::string what;
  std::string refusal;   ///< why it was not made; empty when it was
  double seconds = 0;    ///< of the slowest rank
  bool checked = false;  ///< there were rows whose survival could be verified
  std::uint64_t mismatches = 0;
};

struct run_record {
  std::string driver;
  std::string routing;
  std::vector<std::string> rank_lines;  ///< node, device, NUMA choice of each rank
  int ranks = 1;
  int steps = 0;
  int hidden = 0;
  int top_k = 0;
  int repeat = 1;
  std::uint64_t row_bytes = 0;
  std::uint64_t rows_offset = 0;
  std::uint64_t expected_rows = 0;  ///< of a rank in a step, were all equal
  std::uint64_t worst_rows = 0;     ///< of a rank in a step, were all routed to it
  std::size_t device_capacity = 0;  ///< of the smallest device
  std::size_t device_cap = 0;       ///< --device-cap; 0 when not given
  std::size_t most_region_bytes = 0;

  std::vector<moment> moments;
  std::vector<step_record> steps_done;
  std::vector<change_record> changes;

  traffic_matrix traffic() const;    ///< of all steps
  std::uint64_t mismatches() const;  ///< of all steps and changes
  std::uint64_t tokens() const;
  std::uint64_t rows() const;
  /// What the region is compared with: the cap when there is one, else the device.
  std::size_t device_limit() const { return device_cap != 0 ? device_cap : device_capacity; }
  bool larger_than_device() const { return most_region_bytes > device_limit(); }
  phase_rate rate(phase which) const;  ///< medians over the steps
};

double median(std::vector<double> values);

}  // namespace moe
