// SPDX-License-Identifier: Apache-2.0
#include "comm/ncclmem/ncclmem_pool.hpp"

#include "lib/support/environment.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace evmm {

ncclmem_options ncclmem_options::from_environment() {
  return {.device_limit = environment_bytes("EVMM_NCCLMEM_DEVICE_LIMIT"),
          .host_tail = environment_bytes("EVMM_NCCLMEM_HOST_TAIL").value_or(0)};
}

ncclmem_pool::ncclmem_pool(std::shared_ptr<driver> on, const ncclmem_options& options)
    : on_(std::move(on)),
      options_(options),
      accounts_(static_cast<std::size_t>(on_->device_count())) {}

address ncclmem_pool::allocate(std::size_t bytes) {
  const device_id device = on_->current_device().value_or(device_id{0});
  // One at a time: what is left for one depends on what the other takes.
  const std::lock_guard lock(mutex_);
  const split parts = divide(device, bytes);
  elastic_region region = make(device, parts);
  const auto at = reinterpret_cast<address>(region.data());
  blocks_.emplace(at, block{device, parts, std::move(region)});
  account& held = accounts_[static_cast<std::size_t>(device.value)];
  held.device_bytes += parts.device_bytes;
  held.host_bytes += parts.host_bytes;
  log().debug("ncclMemAlloc: {} of DEVICE {} and {} of host memory at {}",
              format_bytes(parts.device_bytes), device.value, format_bytes(parts.host_bytes),
              format_address(at));
  return at;
}

bool ncclmem_pool::free(address at) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(at);
  if (found == blocks_.end()) return false;
  account& held = accounts_[static_cast<std::size_t>(found->second.device.value)];
  held.device_bytes -= found->second.held.device_bytes;
  held.host_bytes -= found->second.held.host_bytes;
  blocks_.erase(found);
  return true;
}

ncclmem_pool::split ncclmem_pool::divide(device_id device, std::size_t bytes) const {
  const std::size_t unit = on_->granularity(memory_location::on(device));
  if (bytes > static_cast<std::size_t>(-1) - unit) {
    throw invalid_argument(fmt::format("ncclMemAlloc of {} bytes", bytes));
  }
  const std::size_t wanted = (bytes + unit - 1) / unit * unit;
  const account& held = accounts_[static_cast<std::size_t>(device.value)];
  const auto [free_bytes, total_bytes] = on_->usage(memory_location::on(device));
  std::size_t room = free_bytes;
  if (options_.device_limit) {
    room = std::min(room,
                    *options_.device_limit - std::min(*options_.device_limit, held.device_bytes));
  }
  const std::size_t on_device = std::min(wanted, room / unit * unit);
  const std::size_t on_host = wanted - on_device;
  const std::size_t tail_left = options_.host_tail - std::min(options_.host_tail, held.host_bytes);
  if (on_host <= tail_left) return {on_device, on_host};
  throw out_of_memory(
      fmt::format("ncclMemAlloc of {}: DEVICE {} has {} free, of which EVMM_NCCLMEM_DEVICE_LIMIT "
                  "({}) leaves {}; EVMM_NCCLMEM_HOST_TAIL ({}) leaves {} of host memory",
                  format_bytes(bytes), device.value, format_bytes(free_bytes),
                  options_.device_limit ? format_bytes(*options_.device_limit) : "unset",
                  format_bytes(room), format_bytes(options_.host_tail), format_bytes(tail_left)),
      fmt::format("raise {}EVMM_NCCLMEM_HOST_TAIL, which lets buffers end in host memory",
                  room < free_bytes ? "EVMM_NCCLMEM_DEVICE_LIMIT, or " : ""));
}

elastic_region ncclmem_pool::make(device_id device, const split& parts) const {
  const std::size_t bytes = parts.device_bytes + parts.host_bytes;
  const bool both = parts.device_bytes > 0 && parts.host_bytes > 0;
  elastic_region region(on_,
                        {.device = device,
                         .reserve = bytes,
                         .max_segments = both ? 2u : 1u,
                         .max_segment_bytes = bytes,
                         .cache_limit = 0,
                         .peers = peers_of(device),
                         .share = on_->info().fabric_sharing ? share_kind::fabric : share_kind::fd,
                         .rdma = on_->describe(device).rdma_capable});
  if (parts.device_bytes > 0) region.grow(tier::device, parts.device_bytes);
  if (parts.host_bytes > 0) region.grow(tier::host, parts.host_bytes);
  return region;
}

std::vector<device_id> ncclmem_pool::peers_of(device_id device) const {
  std::vector<device_id> peers;
  for (int i = 0; i < on_->device_count(); ++i) {
    const device_id peer{i};
    if (peer != device && on_->can_access(peer, device)) peers.push_back(peer);
  }
  return peers;
}

}  // namespace evmm
