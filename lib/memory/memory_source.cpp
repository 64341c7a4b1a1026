// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/memory_source.hpp"

#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace evmm {

namespace {

/// Loading takes tens of milliseconds, and a machine does not change.
const topology& this_machine() {
  static const topology machine = topology::load();
  return machine;
}

const char* help_for(tier kind) {
  return kind == tier::device
             ? "grow with tier::host, migrate or shrink segments, or trim the caches of other "
               "regions (trim_cache)"
             : "lower the host tier, free host memory, name another node in host_placement, or "
               "raise the memory limit of the container";
}

}  // namespace

memory_lease& memory_lease::operator=(memory_lease&& other) noexcept {
  if (this != &other) {
    reset();
    source_ = other.source_;
    memory_ = other.take();
    reused_ = other.reused_;
  }
  return *this;
}

void memory_lease::reset() noexcept {
  memory_ptr memory = take();
  if (!memory) return;
  if (reused_) {
    source_->recycle(std::move(memory));
  } else {
    source_->release(std::move(memory));
  }
}

memory_source::memory_source(driver& on, const source_options& options)
    : driver_(on), options_(options) {}

memory_location memory_source::location(tier kind) {
  if (kind == tier::device) return memory_location::on(options_.device);
  if (!placement_) {
    placement_ = choose_nodes(driver_, this_machine(), options_.device, options_.host);
  }
  return memory_location::on(placement_->nodes[next_node_ % placement_->nodes.size()]);
}

void memory_source::check_capacity(tier kind, std::size_t bytes) {
  const memory_location where = location(kind);
  // Of host memory the kernel's free count says little: caches give way, and virtual machines
  // grow. There, the creation itself is the check.
  if (kind == tier::host) return;
  const auto [free_bytes, total_bytes] = driver_.usage(where);
  const std::size_t cached = cached_at(where);
  if (bytes <= free_bytes + cached) return;
  throw out_of_memory(
      fmt::format("cannot take {} on {}: {} of {} are free, and {} more are cached here",
                  format_bytes(bytes), to_string(where), format_bytes(free_bytes),
                  format_bytes(total_bytes), format_bytes(cached)),
      help_for(kind));
}

memory_lease memory_source::acquire(tier kind, std::size_t bytes) {
  const memory_location where = location(kind);
  const auto fits = [&](const memory_ptr& memory) {
    return memory->size() == bytes && memory->location() == where;
  };
  // The newest first: its pages are the warmest.
  const auto found = std::find_if(cache_.rbegin(), cache_.rend(), fits);
  if (found != cache_.rend()) {
    memory_ptr memory = std::move(*found);
    cache_.erase(std::next(found).base());
    cached_bytes_ -= bytes;
    ++reused_;
    if (kind == tier::host) ++next_node_;
    return {*this, std::move(memory), true};
  }
  check_capacity(kind, bytes);
  if (kind == tier::device) {
    evict(where, [&] { return driver_.usage(where).free_bytes >= bytes; });
  }
  const allocation_request request{.bytes = bytes,
                                   .where = where,
                                   .share = options_.share,
                                   .rdma = options_.rdma && kind == tier::device};
  memory_ptr memory;
  try {
    memory = std::make_shared<physical_memory>(driver_, request);
  } catch (const out_of_memory&) {
    if (cached_at(where) == 0) throw;
    evict(where, [] { return false; });
    memory = std::make_shared<physical_memory>(driver_, request);
  }
  ++created_;
  if (kind == tier::host) ++next_node_;
  return {*this, std::move(memory), false};
}

void memory_source::release(memory_ptr memory) noexcept {
  if (memory && memory->owned()) ++released_;
}

void memory_source::recycle(memory_ptr memory) noexcept {
  if (!memory || !memory->owned()) return;
  const std::size_t bytes = memory->size();
  if (bytes > options_.cache_limit || memory.use_count() > 1) return release(std::move(memory));
  try {
    cache_.push_back(memory);
  } catch (...) {  // no memory for a list node: releasing is always right
    return release(std::move(memory));
  }
  cached_bytes_ += bytes;
  while (cached_bytes_ > options_.cache_limit) {
    cached_bytes_ -= cache_.front()->size();
    cache_.pop_front();
    ++released_;
  }
}

std::size_t memory_source::trim() noexcept {
  const std::size_t bytes = std::exchange(cached_bytes_, 0);
  released_ += cache_.size();
  cache_.clear();
  return bytes;
}

template <class Enough>
void memory_source::evict(memory_location where, Enough enough) {
  for (auto at = cache_.begin(); at != cache_.end();) {
    if ((*at)->location() != where) {
      ++at;
      continue;
    }
    if (enough()) return;
    cached_bytes_ -= (*at)->size();
    at = cache_.erase(at);
    ++released_;
  }
}

std::size_t memory_source::cached_at(memory_location where) const noexcept {
  std::size_t bytes = 0;
  for (const memory_ptr& memory : cache_) {
    if (memory->location() == where) bytes += memory->size();
  }
  return bytes;
}

}  // namespace evmm
