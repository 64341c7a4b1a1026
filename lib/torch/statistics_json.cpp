// SPDX-License-Identifier: Apache-2.0
#include "lib/torch/statistics_json.hpp"

#include <fmt/format.h>

#include <string_view>

namespace evmm::torch {

namespace {

class flat_json {
 public:
  void add(std::string_view name, std::int64_t value) {
    text_ += fmt::format("{}\"{}\":{}", text_.empty() ? "{" : ",", name, value);
  }
  void add(std::string_view name, const statistic& value) {
    add(fmt::format("{}.current", name), value.current);
    add(fmt::format("{}.peak", name), value.peak);
    add(fmt::format("{}.allocated", name), value.allocated);
    add(fmt::format("{}.freed", name), value.freed);
  }
  void add(std::string_view name, const pool_statistic& value) {
    add(fmt::format("{}.all", name), value.all);
    add(fmt::format("{}.small_pool", name), value.small_pool);
    add(fmt::format("{}.large_pool", name), value.large_pool);
  }
  std::string finish() && { return std::move(text_ += '}'); }

 private:
  std::string text_;
};

}  // namespace

std::string statistics_json(const allocator_statistics& statistics,
                            const std::function<pool_number(pool_id)>& name_of) {
  flat_json json;
  json.add("allocation", statistics.allocation);
  json.add("segment", statistics.segment);
  json.add("active", statistics.active);
  json.add("inactive_split", statistics.inactive_split);
  json.add("allocated_bytes", statistics.allocated_bytes);
  json.add("reserved_bytes", statistics.reserved_bytes);
  json.add("active_bytes", statistics.active_bytes);
  json.add("inactive_split_bytes", statistics.inactive_split_bytes);
  json.add("requested_bytes", statistics.requested_bytes);
  for (const auto& [pool, reserved] : statistics.reserved_bytes_by_private_pools) {
    const auto [first, second] = name_of(pool);
    json.add(fmt::format("reserved_bytes_by_private_pools.{}_{}", first, second), reserved);
  }
  json.add("oversize_allocations", statistics.oversize_allocations);
  json.add("oversize_segments", statistics.oversize_segments);
  json.add("num_alloc_retries", statistics.num_alloc_retries);
  json.add("num_ooms", statistics.num_ooms);
  json.add("num_oom_rejections", statistics.num_oom_rejections);
  json.add("num_sync_all_streams", statistics.num_sync_all_streams);
  json.add("num_device_alloc", statistics.num_device_alloc);
  json.add("num_device_free", statistics.num_device_free);
  json.add("max_split_size", statistics.max_split_size);
  json.add("mapped_bytes", statistics.mapped_bytes);
  json.add("handles_recycled", statistics.handles_recycled);
  json.add("handles_claimed", statistics.handles_claimed);
  json.add("host_tier_bytes", statistics.host_tier_bytes);
  return std::move(json).finish();
}

}  // namespace evmm::torch
