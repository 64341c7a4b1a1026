// SPDX-License-Identifier: Apache-2.0
#include "record.hpp"

#include <algorithm>

namespace moe {

const char* to_string(phase which) {
  switch (which) {
    case phase::counts:
      return "counts";
    case phase::dispatch:
      return "dispatch";
    case phase::experts:
      return "experts";
    case phase::combine:
      return "combine";
  }
  return "?";
}

double median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 != 0) return *middle;
  return (*middle + *std::max_element(values.begin(), middle)) / 2;
}

phase_rate step_record::rate(phase which) const {
  const double time = seconds[static_cast<std::size_t>(which)];
  const int ranks = traffic.ranks();
  const std::uint64_t all = traffic.total().total();
  phase_rate made{.seconds = time};
  if (time <= 0 || which == phase::counts) return made;
  // Experts read and write each row where it lies; the other two move it once.
  const std::uint64_t logical = which == phase::experts ? 2 * all : all;
  const std::uint64_t physical = which == phase::experts ? 0 : all - traffic.own().total();
  made.logical = static_cast<double>(logical) / ranks / time;
  made.physical = static_cast<double>(physical) / ranks / time;
  return made;
}

phase_rate run_record::rate(phase which) const {
  std::vector<double> seconds;
  std::vector<double> logical;
  std::vector<double> physical;
  for (const auto& step : steps_done) {
    const auto one = step.rate(which);
    seconds.push_back(one.seconds);
    logical.push_back(one.logical);
    physical.push_back(one.physical);
  }
  return {median(std::move(seconds)), median(std::move(logical)), median(std::move(physical))};
}

traffic_matrix run_record::traffic() const {
  traffic_matrix sum(ranks);
  for (const auto& step : steps_done) sum += step.traffic;
  return sum;
}

std::uint64_t run_record::mismatches() const {
  std::uint64_t sum = 0;
  for (const auto& step : steps_done) sum += step.mismatches;
  for (const auto& change : changes) sum += change.mismatches;
  return sum;
}

std::uint64_t run_record::tokens() const {
  std::uint64_t sum = 0;
  for (const auto& step : steps_done) sum += step.tokens;
  return sum;
}

std::uint64_t run_record::rows() const {
  std::uint64_t sum = 0;
  for (const auto& step : steps_done) sum += step.rows;
  return sum;
}

}  // namespace moe
