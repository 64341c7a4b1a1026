// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/region_rules.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace evmm {

namespace {
/// Segments of a rank are a bit mask in symmetric_view.
constexpr std::size_t most_segments = 64;
}  // namespace

segment_limits check_limits(driver& on, device_id device, std::size_t reserve,
                            std::size_t max_segments, std::size_t max_segment_bytes) {
  if (reserve == 0) {
    throw invalid_argument("a region cannot reserve 0 bytes",
                           "set `reserve` to the most it may ever hold; addresses cost no memory");
  }
  if (max_segments < 1 || max_segments > most_segments) {
    throw invalid_argument(
        fmt::format("max_segments is {}, not 1 to {}", max_segments, most_segments));
  }
  if (max_segment_bytes == 0) {
    throw invalid_argument("max_segment_bytes is 0", "leave it at its default, 8 GiB");
  }
  const std::size_t granularity = on.granularity(memory_location::on(device));
  return {.reserved = round_up(reserve, granularity),
          .granularity = granularity,
          .max_segments = max_segments,
          .max_segment_bytes = max_segment_bytes};
}

access_rule region_access(driver& on, device_id device, std::span<const device_id> peers,
                          bool cpu_access) {
  std::vector<access_grant> devices = {{memory_location::on(device)}};
  for (const device_id peer : peers) {
    if (!on.can_access(peer, device)) {
      throw unsupported(
          fmt::format("DEVICE {} cannot reach the memory of DEVICE {}", peer.value, device.value),
          "leave it out of `peers`; `evmm info` shows which pairs can");
    }
    devices.push_back({memory_location::on(peer)});
  }
  return [devices, cpu_access](memory_location where) {
    std::vector<access_grant> grants = devices;
    if (where.kind == tier::host && cpu_access) grants.push_back({where});
    return grants;
  };
}

region_statistics describe_statistics(const region_statistics& counts, const part& own,
                                      const memory_source& source, const copier& copies) {
  region_statistics all = counts;
  all.device_bytes = own.mapped_bytes(tier::device);
  all.host_bytes = own.mapped_bytes(tier::host);
  all.discarded_bytes = own.discarded_bytes();
  all.backup_bytes = own.backup_bytes();
  all.cached_bytes = source.cached_bytes();
  all.cached_device_bytes = source.cached_device_bytes();
  all.handles_created = source.created();
  all.handles_reused = source.reused();
  all.handles_released = source.released();
  all.bytes_copied = copies.bytes_copied();
  return all;
}

}  // namespace evmm
