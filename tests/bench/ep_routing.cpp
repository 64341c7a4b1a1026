// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/ep_routing.hpp"

#include "lib/support/environment.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <numeric>

namespace evmm::bench {

namespace {

constexpr int k_most_ranks = 64;  // a bit each in a token's mask

/// The number that each expert gets, so that rank r has [r, r + 1) x experts / ranks.
std::vector<std::int64_t> numbers(const moe::routing& chosen, int experts, int ranks,
                                  placement where) {
  const auto count = static_cast<std::size_t>(experts);
  const std::int64_t local = experts / ranks;
  std::vector<std::int64_t> number(count);
  std::iota(number.begin(), number.end(), 0);
  if (where == placement::round_robin) {
    for (std::int64_t& n : number) n = n % ranks * local + n / ranks;
  }
  if (where != placement::balanced) return number;

  std::vector<std::size_t> chosen_times(count);
  for (const std::int32_t id : chosen.ids) ++chosen_times[static_cast<std::size_t>(id)];
  std::vector<std::size_t> order(count);
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](std::size_t a, std::size_t b) { return chosen_times[a] > chosen_times[b]; });
  struct load {
    std::size_t chosen = 0;
    std::int64_t experts = 0;
  };
  std::vector<load> loads(static_cast<std::size_t>(ranks));
  for (const std::size_t e : order) {
    const auto idlest = std::min_element(loads.begin(), loads.end(), [&](load a, load b) {
      if ((a.experts == local) != (b.experts == local)) return b.experts == local;
      return a.chosen < b.chosen;
    });
    number[e] = (idlest - loads.begin()) * local + idlest->experts++;
    idlest->chosen += chosen_times[e];
  }
  return number;
}

}  // namespace

const char* to_string(placement of_experts) {
  switch (of_experts) {
    case placement::in_order:
      return "in_order";
    case placement::round_robin:
      return "round_robin";
    case placement::balanced:
      return "balanced";
  }
  return "?";
}

ep_routing::ep_routing(const moe::routing& chosen, int ranks, std::size_t tokens, placement where)
    : ranks_(ranks), top_k_(chosen.top_k), tokens_(tokens) {
  if (ranks < 1 || ranks > k_most_ranks) {
    throw invalid_argument(fmt::format("a routing among {} ranks", ranks),
                           fmt::format("run 1 to {} ranks", k_most_ranks));
  }
  if (chosen.tokens() == 0) {
    throw invalid_argument(fmt::format("{}: there is no token in it", chosen.source),
                           "give a routing of at least one token");
  }
  experts_ = (chosen.experts + ranks - 1) / ranks * ranks;
  const std::vector<std::int64_t> number = numbers(chosen, experts_, ranks, where);
  const auto top_k = static_cast<std::size_t>(top_k_);
  const auto count = static_cast<std::size_t>(ranks);
  rows_.resize(count * count);
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t t = 0; t < tokens; ++t) {
      const std::size_t line = (r * tokens + t) % chosen.tokens();
      std::uint64_t mask = 0;
      for (std::size_t k = line * top_k; k < (line + 1) * top_k; ++k) {
        ids_.push_back(number[static_cast<std::size_t>(chosen.ids[k])]);
        weights_.push_back(chosen.weights[k]);
        mask |= std::uint64_t{1} << (ids_.back() / local_experts());
      }
      masks_.push_back(mask);
      for (std::size_t to = 0; to < count; ++to) rows_[r * count + to] += mask >> to & 1;
    }
  }
}

std::span<const std::uint64_t> ep_routing::masks(int rank) const {
  return std::span<const std::uint64_t>(masks_).subspan(static_cast<std::size_t>(rank) * tokens_,
                                                        tokens_);
}

std::size_t ep_routing::rows(int from, int to) const {
  return rows_[static_cast<std::size_t>(from) * static_cast<std::size_t>(ranks_) +
               static_cast<std::size_t>(to)];
}

std::size_t ep_routing::sent(int rank) const {
  std::size_t sum = 0;
  for (int to = 0; to < ranks_; ++to) sum += rows(rank, to);
  return sum;
}

std::size_t ep_routing::received(int rank) const {
  std::size_t sum = 0;
  for (int from = 0; from < ranks_; ++from) sum += rows(from, rank);
  return sum;
}

std::size_t ep_routing::received_at_most() const {
  std::size_t most = 0;
  for (int r = 0; r < ranks_; ++r) most = std::max(most, received(r));
  return most;
}

std::size_t ep_routing::received_in_all() const {
  return std::accumulate(rows_.begin(), rows_.end(), std::size_t{0});
}

std::size_t ep_routing::sent_before(int rank, int to) const {
  std::size_t sum = 0;
  for (int r = 0; r < to; ++r) sum += rows(rank, r);
  return sum;
}

std::size_t ep_routing::received_before(int rank, int from) const {
  std::size_t sum = 0;
  for (int r = 0; r < from; ++r) sum += rows(r, rank);
  return sum;
}

std::vector<std::int32_t> ep_routing::send_tokens(int rank) const {
  std::vector<std::int32_t> tokens;
  for (int to = 0; to < ranks_; ++to) {
    for (std::size_t t = 0; t < tokens_; ++t) {
      if (goes(rank, t, to)) tokens.push_back(static_cast<std::int32_t>(t));
    }
  }
  return tokens;
}

std::vector<std::int32_t> ep_routing::send_slots(int rank) const {
  const auto ranks = static_cast<std::size_t>(ranks_);
  std::vector<std::int32_t> slots(tokens_ * ranks, -1);
  std::int32_t next = 0;
  for (std::size_t to = 0; to < ranks; ++to) {
    for (std::size_t t = 0; t < tokens_; ++t) {
      if (goes(rank, t, static_cast<int>(to))) slots[t * ranks + to] = next++;
    }
  }
  return slots;
}

std::size_t ep_routing::spilled(std::size_t device_rows) const {
  std::size_t sum = 0;
  for (int r = 0; r < ranks_; ++r) sum += received(r) - std::min(received(r), device_rows);
  return sum;
}

std::size_t ep_routing::device_rows_for(double share) const {
  const double most = share * static_cast<double>(received_in_all());
  std::size_t too_few = 0;
  std::size_t enough = received_at_most();
  if (static_cast<double>(spilled(too_few)) <= most) return too_few;
  while (enough - too_few > 1) {
    const std::size_t middle = too_few + (enough - too_few) / 2;
    (static_cast<double>(spilled(middle)) <= most ? enough : too_few) = middle;
  }
  return enough;
}

std::vector<std::string> recorded_routings() {
  namespace fs = std::filesystem;
  fs::path folder;
  std::error_code ignored;
  if (const auto named = environment("EVMM_ROUTING")) {
    if (fs::is_regular_file(*named, ignored)) return {*named};
    if (!fs::is_directory(*named, ignored)) {
      throw invalid_argument(fmt::format("EVMM_ROUTING is '{}', which is not there", *named),
                             "name a routing file, or a folder of *.csv.gz");
    }
    folder = *named;
  } else {
    for (fs::path above = EVMM_SOURCE_DIR; folder.empty(); above = above.parent_path()) {
      if (fs::is_directory(above / "shared/routing", ignored)) folder = above / "shared/routing";
      if (above == above.parent_path()) break;
    }
  }
  std::vector<std::string> found;
  for (const auto& entry : fs::directory_iterator(folder, ignored)) {
    if (entry.path().string().ends_with(".csv.gz")) found.push_back(entry.path().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

}  // namespace evmm::bench
