// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pinned_memory.hpp"

#include "lib/allocator/host_pages.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"
#include "lib/support/node_memory.hpp"

#include <evmm/error.hpp>
#include <evmm/topology.hpp>

#include <fmt/format.h>

#include <utility>

namespace evmm::pinned {

namespace {

/// Refuses more than the machine has free: past that, touching pages ends the process instead of
/// failing.
void check_room(std::size_t bytes) {
  std::size_t free = 0;
  for (const numa_node node : nodes_with_memory()) {
    const auto memory = node_memory(node);
    if (!memory) return;  // nobody tells
    free += memory->free_bytes;
  }
  if (bytes <= free) return;
  throw out_of_memory(fmt::format("cannot make {} of ordinary pages: {} of host memory are free",
                                  format_bytes(bytes), format_bytes(free)),
                      "ask for less, or free host memory");
}

}  // namespace

memory_source::memory_source(std::shared_ptr<driver> on, device_id device,
                             const pinned_options& options)
    : on_(std::move(on)), device_(device), options_(options) {}

std::vector<numa_node> memory_source::choose() const {
  const auto& placement = options_.placement;
  const bool asked = placement.how != host_placement::policy::nearest || !placement.nodes.empty();
  if (!asked && on_->numa_nodes().size() < 2) return {};
  try {
    return choose_nodes(*on_, topology::load(), device_, placement).nodes;
  } catch (const error& failure) {
    // Where no node serves HOST_NUMA memory, page-locked memory can still be had.
    if (asked || failure.category() == error_category::invalid_argument) throw;
    log().info("pinned memory is put where the kernel likes: {}", failure.what());
    return {};
  }
}

std::optional<numa_node> memory_source::next_node() {
  const std::lock_guard lock(mutex_);
  if (!chosen_) nodes_ = choose();
  chosen_ = true;
  if (nodes_.empty()) return std::nullopt;
  return nodes_[next_++ % nodes_.size()];
}

segment memory_source::take(std::size_t bytes) {
  const auto node = next_node();
  if (options_.use_host_register) return take_registered(bytes, node);
  const memory_policy here(node, options_.placement.how == host_placement::policy::bind);
  return {.base = on_->allocate_pinned(bytes), .bytes = bytes};
}

segment memory_source::take_registered(std::size_t bytes, std::optional<numa_node> node) {
  check_room(bytes);
  const address at = map_pages(bytes);
  try {
    if (node) bind_pages(at, bytes, *node, options_.placement.how == host_placement::policy::bind);
    touch_pages(at, bytes, options_.register_threads);
    on_->pin(at, bytes);
  } catch (...) {
    unmap_pages(at, bytes);
    throw;
  }
  return {.base = at, .bytes = bytes, .registered = true};
}

void memory_source::give_back(const segment& which) {
  if (!which.registered) {
    on_->free_pinned(which.base);
    return;
  }
  on_->unpin(which.base);
  unmap_pages(which.base, which.bytes);
}

}  // namespace evmm::pinned
