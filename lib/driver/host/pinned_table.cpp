// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/pinned_table.hpp"

#include "lib/driver/host/pages.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <iterator>
#include <limits>
#include <utility>

namespace evmm::host {

namespace {

constexpr std::size_t k_page = 4096;

std::size_t round_up(std::size_t bytes, std::string_view doing) {
  if (bytes == 0) throw invalid_argument(fmt::format("{} 0 bytes", doing));
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw out_of_memory(fmt::format("{} {} bytes: there are no such addresses", doing, bytes),
                        "ask for less");
  }
  return (bytes + k_page - 1) / k_page * k_page;
}

}  // namespace

pinned_table::pinned_table(memory_table& memory, std::vector<numa_node> nodes)
    : memory_(memory), nodes_(std::move(nodes)) {}

pinned_table::~pinned_table() {
  for (const auto& [at, each] : entries_) {
    if (each.ours) free_addresses(at, each.bytes);
    give_back(each);
  }
}

std::optional<numa_node> pinned_table::pay(std::size_t bytes, std::string_view doing) {
  if (nodes_.empty()) return std::nullopt;  // such a machine counts no host memory
  for (const auto node : nodes_) {
    const auto where = memory_location::on(node);
    if (node != nodes_.back() && memory_.usage(where).free_bytes < bytes) continue;
    memory_.take(where, bytes, doing);
    return node;
  }
  return std::nullopt;
}

void pinned_table::give_back(const entry& which) noexcept {
  if (which.payer) memory_.give_back(memory_location::on(*which.payer), which.bytes);
}

address pinned_table::allocate(std::size_t bytes) {
  constexpr std::string_view doing = "cannot pin";
  entry made{round_up(bytes, doing), true};
  const std::lock_guard lock(mutex_);
  made.payer = pay(made.bytes, doing);
  address at = 0;
  try {
    at = map_private(made.bytes);
    entries_.emplace(at, made);
  } catch (...) {
    if (at != 0) free_addresses(at, made.bytes);
    give_back(made);
    throw;
  }
  return at;
}

pinned_table::table::iterator pinned_table::find(address at, bool ours, std::string_view doing) {
  const auto found = entries_.find(at);
  if (found == entries_.end() || found->second.ours != ours) {
    throw invalid_argument(
        fmt::format("{} {}: {}", doing, format_address(at),
                    found == entries_.end() ? "nothing that is pinned starts there"
                    : ours                  ? "it was pinned where it lay"
                                            : "it was allocated so"),
        ours ? "pass what allocate_pinned gave, once" : "pass the address that was pinned, once");
  }
  return found;
}

void pinned_table::free(address at) {
  const std::lock_guard lock(mutex_);
  const auto found = find(at, true, "cannot free pinned memory at");
  free_addresses(at, found->second.bytes);
  give_back(found->second);
  entries_.erase(found);
}

void pinned_table::pin(address at, std::size_t bytes) {
  const auto doing = fmt::format("cannot pin {} bytes at {}:", bytes, format_address(at));
  static_cast<void>(round_up(bytes, doing));
  if (at == 0 || bytes > std::numeric_limits<address>::max() - at) {
    throw invalid_argument(doing + " there is no such memory");
  }
  // Pages are locked whole.
  const address base = at / k_page * k_page;
  const std::size_t whole = (at + bytes - base + k_page - 1) / k_page * k_page;
  const std::lock_guard lock(mutex_);
  auto next = entries_.upper_bound(at);
  const bool before =
      next != entries_.begin() && std::prev(next)->first + std::prev(next)->second.bytes > base;
  if (before || (next != entries_.end() && next->first < base + whole)) {
    throw invalid_argument(doing + " some of it is pinned already", "unpin it first");
  }
  if (memory_.reserved(base, whole)) {
    throw invalid_argument(doing + " some of it is reserved by the driver",
                           "HOST_NUMA memory is page-locked from the start");
  }
  if (!is_mapped(base, whole)) {
    throw invalid_argument(doing + " some of it is no memory of the process");
  }
  const auto payer = pay(whole, "cannot pin");
  try {
    entries_.emplace(at, entry{whole, false, payer});
  } catch (...) {
    give_back({whole, false, payer});
    throw;
  }
}

void pinned_table::unpin(address at) {
  const std::lock_guard lock(mutex_);
  const auto found = find(at, false, "cannot unpin");
  give_back(found->second);
  entries_.erase(found);
}

}  // namespace evmm::host
