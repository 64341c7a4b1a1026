// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/options_keys.hpp"
#include "lib/support/format.hpp"

#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

namespace evmm {

namespace {

using namespace evmm::units;

// PyTorch's limit for one request: 1 EiB. Keeps sums of sizes from wrapping around.
constexpr std::size_t k_most_bytes = std::size_t{1} << 60;
// Such a fraction is a number of bytes whose unit was forgotten.
constexpr double k_most_fraction = 1024;

using fault = std::optional<option_fault>;

fault sizes_fault(const allocator_options& o) {
  const std::pair<std::string_view, std::size_t> sizes[] = {
      {"min_block_size", o.min_block},
      {"small_limit_kb", o.small_limit},
      {"small_segment_size_mb", o.small_segment},
      {"large_segment_size_mb", o.large_segment},
      {"min_large_size_mb", o.min_large},
      {"max_split_size_mb", o.max_split_size.value_or(0)},
      {"max_non_split_rounding_mb", o.max_non_split_rounding.value_or(0)},
      {"expandable_segments_reserve", o.expandable_segments_reserve.bytes},
      {"min_handle_size_mb", o.min_handle},
      {"max_handle_size_mb", o.max_handle},
      {"pinned_reserve_segment_size_mb", o.pinned.reserve_segment},
      {"pinned_max_round_threshold_mb", o.pinned.max_round_threshold},
      {"pinned_max_cached_size_mb", o.pinned.max_cached_size.value_or(0)}};
  for (const auto& [key, bytes] : sizes) {
    if (bytes < k_most_bytes) continue;
    return option_fault{key, fmt::format("is {}; it must be below {}", format_bytes(bytes),
                                         format_bytes(k_most_bytes))};
  }
  return {};
}

/// `key` must be at least `least`, which `least_key` sets.
fault least_fault(std::string_view key, std::size_t bytes, std::string_view least_key,
                  std::size_t least) {
  if (bytes >= least) return {};
  return option_fault{key,
                      fmt::format("is {}; it must be at least {} ({})", format_bytes(bytes),
                                  least_key, format_bytes(least)),
                      least_key};
}

fault multiple_fault(std::string_view key, std::size_t bytes, std::size_t min_block) {
  if (bytes % min_block == 0) return {};
  return option_fault{key,
                      fmt::format("is {} B, no multiple of min_block_size ({})", bytes, min_block),
                      "min_block_size"};
}

fault blocks_fault(const allocator_options& o) {
  if (!std::has_single_bit(o.min_block) || o.min_block < 16) {
    return option_fault{
        "min_block_size",
        fmt::format("is {}; it must be a power of two of at least 16", o.min_block)};
  }
  for (const auto& found :
       {least_fault("small_limit_kb", o.small_limit, "min_block_size", o.min_block),
        least_fault("small_segment_size_mb", o.small_segment, "small_limit_kb", o.small_limit),
        least_fault("min_large_size_mb", o.min_large, "small_limit_kb", o.small_limit),
        multiple_fault("small_limit_kb", o.small_limit, o.min_block),
        multiple_fault("small_segment_size_mb", o.small_segment, o.min_block),
        multiple_fault("large_segment_size_mb", o.large_segment, o.min_block)}) {
    if (found) return found;
  }
  if (o.large_segment <= o.min_large) {
    return option_fault{"large_segment_size_mb",
                        fmt::format("is {}; it must be more than min_large_size_mb ({})",
                                    format_bytes(o.large_segment), format_bytes(o.min_large)),
                        "min_large_size_mb"};
  }
  for (const auto& [key, bytes] : {std::pair{"max_split_size_mb", o.max_split_size},
                                   {"max_non_split_rounding_mb", o.max_non_split_rounding}}) {
    if (!bytes) continue;
    if (auto found = least_fault(key, *bytes, "large_segment_size_mb", o.large_segment)) {
      return found;
    }
  }
  return {};
}

fault rounding_fault(const allocator_options& o) {
  const auto refuse = [](std::string why) {
    return option_fault{"roundup_power2_divisions", std::move(why)};
  };
  std::size_t last = 0;
  for (const rounding_step& step : o.roundup_power2_divisions) {
    const bool first = &step == o.roundup_power2_divisions.data();
    if (first ? step.from != 0
              : step.from < 2 || step.from <= last || !std::has_single_bit(step.from)) {
      return refuse(
          fmt::format("has a step from {} B; the first step must be from 0, the others "
                      "from ascending powers of two",
                      step.from));
    }
    if (step.divisions != 0 && !std::has_single_bit(step.divisions)) {
      return refuse(
          fmt::format("has {} divisions; they must be 0 or a power of two", step.divisions));
    }
    last = step.from;
  }
  return {};
}

fault limits_fault(const allocator_options& o) {
  // Written so that no comparison is true for a NaN.
  if (!(o.garbage_collection_threshold >= 0 && o.garbage_collection_threshold < 1)) {
    return option_fault{"garbage_collection_threshold",
                        fmt::format("is {}; it must be above 0 and below 1, or 0 for none",
                                    o.garbage_collection_threshold)};
  }
  if (!(o.per_process_memory_fraction >= 0 && o.per_process_memory_fraction <= 1)) {
    return option_fault{"per_process_memory_fraction", fmt::format("is {}; it must be from 0 to 1",
                                                                   o.per_process_memory_fraction)};
  }
  return {};
}

fault reserve_fault(std::string_view key, std::string_view of, const reservation& value) {
  if (value.bytes != 0) {
    if (value.bytes < k_most_bytes) return {};
    return option_fault{key, fmt::format("{}is {}; it must be below {}", of,
                                         format_bytes(value.bytes), format_bytes(k_most_bytes))};
  }
  if (value.fraction > 0 && value.fraction <= k_most_fraction) return {};
  return option_fault{key, fmt::format("{}is {}; a fraction must be above 0 and at most {}, and a "
                                       "size needs its unit (40G)",
                                       of, value.fraction, k_most_fraction)};
}

fault segments_fault(const allocator_options& o) {
  if (auto found =
          reserve_fault("expandable_segments_reserve", "", o.expandable_segments_reserve)) {
    return found;
  }
  constexpr std::string_view by_class = "expandable_segments_reserve_by_class";
  for (const auto& [name, value] : o.expandable_segments_reserve_by_class) {
    if (name.empty() || name.find_first_of(",:[] \t\n\v\f\r") != std::string::npos) {
      return option_fault{by_class, fmt::format("names the class {}; a name is not empty and has "
                                                "no white space, comma, colon or bracket",
                                                quote_option(name))};
    }
    if (auto found = reserve_fault(by_class, fmt::format("of {} ", quote_option(name)), value)) {
      return found;
    }
  }
  if (!(o.recycle_slack >= 0 && o.recycle_slack <= 1)) {
    return option_fault{"recycle_slack",
                        fmt::format("is {}; it must be from 0 to 1", o.recycle_slack)};
  }
  if (o.min_handle == 0) return option_fault{"min_handle_size_mb", "is 0; it must be above 0"};
  if (o.max_handle % o.min_handle != 0 || !std::has_single_bit(o.max_handle / o.min_handle)) {
    return option_fault{
        "max_handle_size_mb",
        fmt::format("is {}; it must be min_handle_size_mb ({}) times a power of two",
                    format_bytes(o.max_handle), format_bytes(o.min_handle)),
        "min_handle_size_mb"};
  }
  if (o.handle_fraction == 0) return option_fault{"handle_fraction", "is 0; it must be at least 1"};
  return {};
}

fault peers_fault(const allocator_options& o) {
  for (auto peer = o.peers.begin(); peer != o.peers.end(); ++peer) {
    if (peer->value < 0) return option_fault{"peers", fmt::format("names device {}", peer->value)};
    if (std::find(o.peers.begin(), peer, *peer) != peer) {
      return option_fault{"peers", fmt::format("names device {} twice", peer->value)};
    }
  }
  return {};
}

fault placement_fault(std::string_view key, const host_placement& placement) {
  using policy = host_placement::policy;
  if (placement.how == policy::nearest && !placement.nodes.empty()) {
    return option_fault{key, "is nearest with nodes; nearest chooses them itself"};
  }
  if (placement.how == policy::bind && placement.nodes.empty()) {
    return option_fault{key, "is bind without a node to bind to"};
  }
  for (const numa_node node : placement.nodes) {
    if (node.value < 0) return option_fault{key, fmt::format("names node {}", node.value)};
  }
  return {};
}

fault pinned_fault(const allocator_options& o) {
  if (!std::has_single_bit(o.pinned.register_threads) || o.pinned.register_threads > 128) {
    return option_fault{
        "pinned_num_register_threads",
        fmt::format("is {}; it must be a power of two from 1 to 128", o.pinned.register_threads)};
  }
  return placement_fault("pinned_placement", o.pinned.placement);
}

}  // namespace

std::optional<option_fault> find_option_fault(const allocator_options& options) {
  if (auto found = sizes_fault(options)) return found;
  if (auto found = blocks_fault(options)) return found;
  if (auto found = rounding_fault(options)) return found;
  if (auto found = limits_fault(options)) return found;
  if (auto found = segments_fault(options)) return found;
  if (auto found = peers_fault(options)) return found;
  if (auto found = placement_fault("host_placement", options.host)) return found;
  return pinned_fault(options);
}

}  // namespace evmm
