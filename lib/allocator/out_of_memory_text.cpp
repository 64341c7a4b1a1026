// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/out_of_memory_text.hpp"

#include "lib/support/format.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <string>

namespace evmm {

namespace {

/// Why free memory did not serve.
struct fragmentation {
  std::size_t largest = 0;        ///< the largest free block that the request could have used
  std::size_t scattered = 0;      ///< free in the same arena, in pieces too small
  std::size_t pinned = 0;         ///< of those, beside live blocks on the same handle or segment
  std::size_t other_pools = 0;    ///< free in other pools with a tier of this one's
  std::size_t private_pools = 0;  ///< of those, in pools that can be released: not the default one
  std::size_t other_streams = 0;  ///< free in the same pool, on other streams
  std::size_t waiting = 0;        ///< freed, still in use by other streams
};

fragmentation look(caching_allocator::state& of, const arena& from) {
  fragmentation found;
  for (arena* one : of.all_arenas) {
    const std::lock_guard held(one->guard());
    const std::size_t releasable = of.supply.releasable(*one);
    const std::size_t free = one->free_bytes();
    if (one == &from) {
      one->for_each_free(
          0, [&](const block* b) { found.largest = std::max(found.largest, b->bytes); });
      found.scattered = free;
      found.pinned = free - std::min(free, releasable);
    } else if (&one->pool() != &from.pool()) {
      const auto& tiers = from.pool().options.tiers;
      const bool alike = std::any_of(tiers.begin(), tiers.end(),
                                     [&](tier kind) { return one->pool().in_tier(kind); });
      if (alike) found.other_pools += free;
      if (alike && one->pool().id != pool_id{}) found.private_pools += free;
    } else {
      found.other_streams += free;
    }
  }
  return found;
}

/// Of all nodes together.
memory_usage host_usage(const driver& on) {
  memory_usage all{};
  for (const numa_node node : on.numa_nodes()) {
    const memory_usage its = on.usage(memory_location::on(node));
    all.total_bytes += its.total_bytes;
    all.free_bytes += its.free_bytes;
  }
  return all;
}

}  // namespace

out_of_memory out_of_memory_text(caching_allocator::state& of, const arena& from, std::size_t size,
                                 const oom_report& report) {
  allocator_statistics now;
  of.books.fill(now);
  const fragmentation why = look(of, from);
  const auto bytes = [](auto n) { return format_bytes(static_cast<std::size_t>(n)); };
  const std::size_t held = of.supply.held_bytes(tier::device);
  std::string text = fmt::format(
      "cannot allocate {} ({} rounded) on DEVICE {}{}: {} of {} are free on the device; this "
      "allocator holds {}{}, of which {} are allocated",
      bytes(report.requested_bytes), bytes(size), of.device.value,
      report.rejected ? " (refused before the driver was asked)" : "", bytes(report.free_bytes),
      bytes(report.total_bytes), bytes(held),
      of.limit() < of.total_bytes ? fmt::format(" of the {} it may hold", bytes(of.limit())) : "",
      bytes(now.allocated_bytes.all.current));
  const auto add = [&](std::size_t amount, const char* what) {
    if (amount > 0) text += fmt::format(", {} {}", bytes(amount), what);
  };
  text += fmt::format("; pool {}, {} blocks, stream {}: the largest free block has {}",
                      static_cast<std::uint64_t>(from.pool().id),
                      from.kind() == size_class::small ? "small" : "large",
                      static_cast<const void*>(from.stream()), bytes(why.largest));
  add(why.scattered, "are free in pieces across segments");
  add(why.pinned, "of them pinned by live blocks beside them");
  add(why.other_streams, "are cached for other streams");
  add(why.other_pools, "are cached in other pools");
  const auto waiting = now.active_bytes.all.current - now.allocated_bytes.all.current;
  add(static_cast<std::size_t>(waiting), "wait for other streams");
  const bool device_too = from.pool().in_tier(tier::device);
  const bool host_too = from.pool().in_tier(tier::host);
  const memory_usage host = host_too ? host_usage(*of.on) : memory_usage{};
  if (host_too) {
    text += fmt::format("; host memory: {} of {} are free, this allocator holds {}",
                        bytes(host.free_bytes), bytes(host.total_bytes),
                        bytes(of.supply.held_bytes(tier::host)));
  }
  std::size_t others = 0;
  std::string who;
  for (const process_usage& one : of.on->processes(of.device)) {
    if (one.this_process) continue;
    others += one.bytes;
    who += fmt::format("{}process {} {}", who.empty() ? "" : ", ", one.pid, bytes(one.bytes));
  }
  const std::size_t known = report.free_bytes + held + others;
  const std::size_t outside = report.total_bytes - std::min(report.total_bytes, known);
  if (outside > 0) {
    text += fmt::format("; in use on the device outside this allocator: {}", bytes(outside));
  }
  if (!who.empty()) text += "; also on the device: " + who;

  const allocator_options& options = of.options.now();
  const bool for_all = from.pool().id == pool_id{};
  const std::size_t needed = of.expandable(from) ? size : of.rules.segment_bytes(size);
  std::string help;
  if (from.pool().options.functions) {
    text += "; the pool's own `allocate` returned null";
    help = "free memory where the pool's functions take it from";
  } else if (report.rejected) {
    help =
        "free memory, or unset throw_on_cudamalloc_oom so that cached memory is given back first";
  } else if (device_too && of.limit() < of.total_bytes && held + needed > of.limit()) {
    help = "raise per_process_memory_fraction, now " +
           fmt::format("{:.3f}", options.per_process_memory_fraction);
  } else if (why.private_pools >= size) {
    help = "release pools that are no longer used";
    if (for_all) help += ", or give them use_on_oom";
  } else if (!of.expandable(from) && why.scattered >= size) {
    help = from.pool().options.expandable_segments
               ? "let the pool's segments expand (pool_options::expandable_segments)"
               : "set expandable_segments:True";
    help += ", which moves free memory to where it is needed";
  } else if (options.recycle == recycling::never && why.scattered >= size) {
    help = "set recycle_handles:ready, which moves free memory to where it is needed";
  } else if (device_too && others >= size) {
    help = "stop the other processes on this device";
  } else if (!host_too) {
    help = "use a pool whose tiers include the host, or smaller batches";
  } else if (!device_too) {
    help = "use less memory: the host tier is full; a pool may have the device as a tier too";
  } else if (!from.pool().options.may_span &&
             report.free_bytes + host.free_bytes + why.scattered >= size) {
    help = "set the pool's may_span, which lets one allocation lie in both tiers";
  } else {
    help = "use less memory: both tiers are full";
  }
  return out_of_memory(std::move(text), std::move(help));
}

}  // namespace evmm
