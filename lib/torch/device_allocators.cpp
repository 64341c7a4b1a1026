// SPDX-License-Identifier: Apache-2.0
#include "lib/torch/device_allocators.hpp"

#include "lib/support/log.hpp"
#include "lib/support/thread_object.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <vector>

namespace evmm::torch {

// --- pools of graphs ---------------------------------------------------------------------------

device_allocator::graph_pool& device_allocator::find(const pool_number& name, const char* what) {
  const auto found = graph_pools_.find(name);
  if (found == graph_pools_.end()) {
    throw invalid_argument(
        fmt::format("{}: no allocations ever went to pool ({}, {})", what, name.first, name.second),
        "begin_allocate_to_pool makes it");
  }
  return found->second;
}

void device_allocator::drop_user(std::map<pool_number, graph_pool>::iterator of) {
  allocator.release_pool(of->second.its);
  if (--of->second.users == 0) graph_pools_.erase(of);
}

void device_allocator::begin(const pool_number& name, std::function<bool(native_stream)> filter) {
  const std::lock_guard lock(guard_);
  const auto [at, fresh] = graph_pools_.try_emplace(name);
  graph_pool& pool = at->second;
  try {
    if (fresh) {
      pool.its = allocator.create_pool();
      names_[pool.its] = name;
    } else {
      allocator.retain_pool(pool.its);
    }
  } catch (...) {
    if (fresh) graph_pools_.erase(at);
    throw;
  }
  ++pool.users;
  try {
    allocator.begin_capture(pool.its);
    try {
      allocator.begin_allocate_to_pool(pool.its, std::move(filter));
    } catch (...) {
      log_failure("undoing begin_capture", [&] { allocator.end_capture(pool.its); });
      throw;
    }
  } catch (...) {
    log_failure("undoing the use of a pool", [&] { drop_user(at); });
    throw;
  }
  ++captures_;
}

void device_allocator::end(const pool_number& name) {
  const std::lock_guard lock(guard_);
  const graph_pool& pool = find(name, "end_allocate_to_pool");
  allocator.end_allocate_to_pool(pool.its);
  --captures_;
  allocator.end_capture(pool.its);
}

void device_allocator::release(const pool_number& name) {
  const std::lock_guard lock(guard_);
  find(name, "release_pool");
  drop_user(graph_pools_.find(name));
}

pool_number device_allocator::name_of(pool_id pool) const {
  const auto number = static_cast<std::uint64_t>(pool);
  const std::lock_guard lock(guard_);
  const auto found = names_.find(pool);
  return found == names_.end() ? pool_number{number, number} : found->second;
}

allocator_snapshot device_allocator::snapshot() const {
  allocator_snapshot taken = allocator.snapshot();
  const auto rename = [this](pool_number& pool) {
    if (pool != pool_number{}) pool = name_of(pool_id{pool.second});
  };
  for (segment_snapshot& each : taken.segments) rename(each.pool);
  for (auto& trace : taken.device_traces) {
    for (trace_entry& each : trace) rename(each.pool);
  }
  return taken;
}

// --- tiers -------------------------------------------------------------------------------------

/// What the calling thread has begun, innermost last.
std::vector<std::pair<const device_allocator*, tier_choice>>& device_allocator::begun_tiers() {
  return thread_object<std::vector<std::pair<const device_allocator*, tier_choice>>>();
}

std::optional<tier_choice> device_allocator::innermost() const {
  const auto& begun = begun_tiers();
  const auto last = std::find_if(begun.rbegin(), begun.rend(),
                                 [this](const auto& one) { return one.first == this; });
  return last == begun.rend() ? std::nullopt : std::optional(last->second);
}

/// What a graph will replay on comes from its pool, which keeps it for the graph.
bool device_allocator::captured(native_stream stream) const {
  return captures_ > 0 && allocator.on().capture(stream).status != capture_status::none;
}

device_allocator::tier_pool& device_allocator::pool_of(tier_choice tiers) noexcept {
  return tier_pools_[static_cast<std::size_t>(tiers)];
}

void device_allocator::begin(tier_choice tiers) {
  const std::lock_guard lock(guard_);
  tier_pool& pool = pool_of(tiers);
  if (!pool.its) {
    pool_options options;
    options.tiers = {tier::device, tier::host};
    if (tiers == tier_choice::host_only) options.tiers = {tier::host};
    pool.its = allocator.create_pool(options);
  }
  begun_tiers().emplace_back(this, tiers);
  if (pool.begun == 0) {
    try {
      allocator.begin_allocate_to_pool(*pool.its, [this, tiers](native_stream stream) {
        return innermost() == tiers && !captured(stream);
      });
    } catch (...) {
      begun_tiers().pop_back();
      throw;
    }
  }
  ++pool.begun;
}

void device_allocator::end(tier_choice tiers) {
  const std::lock_guard lock(guard_);
  if (innermost() != tiers) {
    throw invalid_argument("these tiers are not what this thread began last on this device",
                           "end in the thread that began, the last begun first");
  }
  tier_pool& pool = pool_of(tiers);
  if (pool.begun == 1) allocator.end_allocate_to_pool(*pool.its);
  --pool.begun;
  auto& begun = begun_tiers();
  const auto last = std::find_if(begun.rbegin(), begun.rend(),
                                 [this](const auto& one) { return one.first == this; });
  begun.erase(std::next(last).base());
}

void device_allocator::empty(tier_choice tiers) {
  std::optional<pool_id> its;
  {
    const std::lock_guard lock(guard_);
    its = pool_of(tiers).its;
  }
  if (its) allocator.empty_cache(its);
}

// --- the allocators of a process ---------------------------------------------------------------

device_allocators& device_allocators::all() {
  static auto* const its = new device_allocators;
  return *its;
}

device_allocator* device_allocators::made(int device) const noexcept {
  if (device < 0 || device >= k_most_devices) return nullptr;
  return made_[static_cast<std::size_t>(device)].load(std::memory_order_acquire);
}

device_allocator& device_allocators::of(int device) {
  if (device_allocator* const found = made(device)) return *found;
  const std::lock_guard lock(guard_);
  if (device_allocator* const found = made(device)) return *found;
  const auto on = default_driver();
  const int count = std::min(on->device_count(), k_most_devices);
  if (device < 0 || device >= count) {
    throw invalid_argument(fmt::format("there is no device {}", device),
                           fmt::format("there are {}, numbered from 0", count));
  }
  auto fresh = std::make_unique<device_allocator>(on, device_id{device}, options_for_new());
  if (history_) fresh->allocator.record_history(*history_);
  device_allocator* const found = fresh.release();
  made_[static_cast<std::size_t>(device)].store(found, std::memory_order_release);
  end_.store(std::max(end_.load(), device + 1));
  return *found;
}

device_allocator* device_allocators::owner(const void* at) const noexcept {
  const int end = end_.load();
  for (int device = 0; device < end; ++device) {
    device_allocator* const one = made(device);
    if (one != nullptr && one->allocator.owns(at)) return one;
  }
  return nullptr;
}

void device_allocators::for_each_made(const std::function<void(device_allocator&)>& visit) const {
  const int end = end_.load();
  for (int device = 0; device < end; ++device) {
    if (device_allocator* const one = made(device)) visit(*one);
  }
}

allocator_options device_allocators::options_for_new() const {
  return options_ ? *options_ : options_from_environment();
}

void device_allocators::configure(std::string_view text) {
  const std::lock_guard lock(guard_);
  const allocator_options next = parse_options(text, options_for_new());
  check(next);
  for_each_made([text](device_allocator& one) { one.allocator.configure(text); });
  options_ = next;
}

void device_allocators::record_history(const history_options& options) {
  const std::lock_guard lock(guard_);
  for_each_made([&](device_allocator& one) { one.allocator.record_history(options); });
  history_ = options;
}

}  // namespace evmm::torch
