// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/memory_table.hpp"

#include "lib/driver/host/pages.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <utility>
#include <vector>

namespace evmm::host {

namespace {

std::string span_text(address at, std::size_t bytes) {
  return fmt::format("{} at {}", format_bytes(bytes), format_address(at));
}

void check_size(std::size_t bytes, std::string_view doing) {
  if (bytes == 0 || bytes % k_granularity != 0) {
    throw invalid_argument(fmt::format("{} {} bytes: not a positive multiple of the granularity {}",
                                       doing, bytes, format_bytes(k_granularity)),
                           "round up to driver::granularity");
  }
}

void check_range(address at, std::size_t bytes, std::string_view doing) {
  check_size(bytes, doing);
  if (at == 0 || at % k_granularity != 0) {
    throw invalid_argument(fmt::format("{} {}: the address is not a multiple of the granularity {}",
                                       doing, span_text(at, bytes), format_bytes(k_granularity)));
  }
  if (bytes > std::numeric_limits<address>::max() - at) {
    throw invalid_argument(
        fmt::format("{} {}: past the end of the addresses", doing, span_text(at, bytes)));
  }
}

access_kind most(const std::map<memory_location, access_kind>& grants) {
  access_kind found = access_kind::none;
  for (const auto& [who, kind] : grants) found = std::max(found, kind);
  return found;
}

}  // namespace

memory_table::memory_table(const host_driver_options& options) : fabric_(options.fabric) {
  for (int i = 0; i < options.devices; ++i) {
    accounts_[memory_location::on(device_id{i})].total = options.device_bytes;
  }
  for (const int node : options.numa_nodes) {
    accounts_[memory_location::on(numa_node{node})].total = options.host_bytes;
  }
}

memory_table::~memory_table() {
  for (const auto& [base, bytes] : ranges_) free_addresses(base, bytes);
}

void memory_table::check_location(memory_location where) const {
  if (accounts_.contains(where)) return;  // its keys never change
  std::vector<int> there;
  for (const auto& [location, account] : accounts_) {
    if (location.kind == where.kind) there.push_back(location.index);
  }
  const bool device = where.kind == tier::device;
  throw invalid_argument(
      fmt::format("{} does not exist; there are: {}", to_string(where),
                  there.empty() ? "none" : fmt::format("{}", fmt::join(there, ", "))),
      device ? "host_driver_options::devices (EVMM_HOST_DEVICES) sets how many there are"
             : "host_driver_options::numa_nodes (EVMM_HOST_NUMA_NODES) sets which there are");
}

memory_table::account& memory_table::account_of(memory_location where) {
  check_location(where);
  return accounts_.at(where);
}

memory_usage memory_table::usage(memory_location where) const {
  check_location(where);
  const std::lock_guard lock(mutex_);
  const account& found = accounts_.at(where);
  return {found.total - found.held, found.total};
}

address memory_table::reserve(std::size_t bytes, std::size_t alignment, address hint) {
  check_size(bytes, "cannot reserve");
  if ((alignment & (alignment - 1)) != 0) {
    throw invalid_argument(
        fmt::format("cannot reserve addresses aligned to {}: not a power of two", alignment));
  }
  if (hint % k_granularity != 0) {
    throw invalid_argument(fmt::format("cannot reserve addresses at {}: not a multiple of {}",
                                       format_address(hint), format_bytes(k_granularity)));
  }
  alignment = std::max(alignment, k_granularity);
  if (bytes > std::numeric_limits<std::size_t>::max() - alignment) {
    throw invalid_argument(
        fmt::format("cannot reserve {} bytes aligned to {}: there are no such "
                    "addresses",
                    bytes, alignment));
  }
  const std::lock_guard lock(mutex_);
  const address base = reserve_addresses(bytes, alignment, hint);
  try {
    ranges_.emplace(base, bytes);
  } catch (...) {
    free_addresses(base, bytes);
    throw;
  }
  return base;
}

void memory_table::free(address base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto range = ranges_.find(base);
  if (range == ranges_.end() || range->second != bytes) {
    throw invalid_argument(fmt::format(
        "cannot free {}: {}", span_text(base, bytes),
        range == ranges_.end() ? "no reserved range starts there"
                               : fmt::format("the range has {}", format_bytes(range->second))));
  }
  if (const auto inside = first_past(base);
      inside != mapped_.end() && inside->first < base + bytes) {
    throw invalid_argument(
        fmt::format("cannot free {}: {} is still mapped in it", span_text(base, bytes),
                    span_text(inside->first, inside->second.bytes)),
        "unmap it first");
  }
  free_addresses(base, bytes);
  ranges_.erase(range);
}

allocation_handle memory_table::create(const allocation_request& request) {
  const std::lock_guard lock(mutex_);
  account& payer = account_of(request.where);
  const auto doing = fmt::format("cannot create on {}", to_string(request.where));
  check_size(request.bytes, doing);
  if (request.rdma && request.where.kind == tier::host) {
    throw invalid_argument(doing + ": GPUDirect RDMA is a property of device memory",
                           "leave rdma false for host memory");
  }
  if (request.share == share_kind::fabric && !fabric_) {
    throw unsupported(doing + ": this host driver has no fabric handles",
                      "set host_driver_options::fabric (EVMM_HOST_FABRIC=1), or share by fd");
  }
  check_room(payer, request.where, request.bytes, "cannot create");
  physical made{make_pages(request.bytes, request.where.kind), request.bytes, request.where.kind,
                request.share};
  if (request.where.kind == tier::host) {
    bind_pages(made.pages.get(), request.bytes, numa_node{request.where.index});
  }
  made.paid = std::make_shared<charge>(payer, request.bytes);
  return add(std::move(made));
}

void memory_table::check_room(const account& payer, memory_location where, std::size_t bytes,
                              std::string_view doing) {
  if (bytes <= payer.total - payer.held) return;
  throw out_of_memory(
      fmt::format("{} {} on {}: {} of {} free, this process holds {}", doing, format_bytes(bytes),
                  to_string(where), format_bytes(payer.total - payer.held),
                  format_bytes(payer.total), format_bytes(payer.held)),
      where.kind == tier::device
          ? "release memory, use the host tier, or raise host_driver_options::device_bytes "
            "(EVMM_HOST_DEVICE_BYTES)"
          : "release memory, or raise host_driver_options::host_bytes (EVMM_HOST_BYTES)");
}

void memory_table::take(memory_location where, std::size_t bytes, std::string_view doing) {
  const std::lock_guard lock(mutex_);
  account& payer = account_of(where);
  check_room(payer, where, bytes, doing);
  payer.held += bytes;
}

void memory_table::give_back(memory_location where, std::size_t bytes) noexcept {
  const std::lock_guard lock(mutex_);
  accounts_.find(where)->second.held -= bytes;
}

bool memory_table::reserved(address at, std::size_t bytes) const {
  const std::lock_guard lock(mutex_);
  const auto past = ranges_.lower_bound(at + bytes);
  return past != ranges_.begin() && std::prev(past)->first + std::prev(past)->second > at;
}

memory_table::physical& memory_table::find(allocation_handle handle) {
  return const_cast<physical&>(std::as_const(*this).find(handle));
}

const memory_table::physical& memory_table::find(allocation_handle handle) const {
  const auto found = handles_.find(static_cast<std::uint64_t>(handle));
  if (found == handles_.end()) {
    throw invalid_argument(fmt::format("handle {} does not exist, or was released",
                                       static_cast<std::uint64_t>(handle)));
  }
  return found->second;
}

allocation_handle memory_table::add(physical made) {
  handles_.emplace(next_handle_, std::move(made));
  return allocation_handle{next_handle_++};
}

void memory_table::release(allocation_handle handle) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(find(handle));
  handles_.erase(static_cast<std::uint64_t>(handle));
}

memory_table::mapped_table::iterator memory_table::first_past(address at) {
  auto next = mapped_.upper_bound(at);
  if (next != mapped_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second.bytes > at) return before;
  }
  return next;
}

void memory_table::check_in_one_range(address at, std::size_t bytes, std::string_view doing) const {
  const auto next = ranges_.upper_bound(at);
  if (next != ranges_.begin()) {
    const auto& [base, size] = *std::prev(next);
    if (bytes <= size && at - base <= size - bytes) return;
  }
  throw invalid_argument(
      fmt::format("{} {}: not inside one reserved range", doing, span_text(at, bytes)));
}

void memory_table::map(address at, std::size_t bytes, allocation_handle handle) {
  check_range(at, bytes, "cannot map");
  const std::lock_guard lock(mutex_);
  const physical& memory = find(handle);
  if (bytes != memory.bytes) {
    throw invalid_argument(fmt::format("cannot map {}: the handle has {} and is mapped whole",
                                       span_text(at, bytes), format_bytes(memory.bytes)));
  }
  check_in_one_range(at, bytes, "cannot map");
  if (const auto other = first_past(at); other != mapped_.end() && other->first < at + bytes) {
    throw invalid_argument(fmt::format("cannot map {}: {} is mapped there", span_text(at, bytes),
                                       span_text(other->first, other->second.bytes)));
  }
  const auto entry = mapped_.try_emplace(at).first;
  entry->second.bytes = bytes;
  entry->second.kind = memory.kind;
  entry->second.paid = memory.paid;
  try {
    map_pages(at, bytes, memory.pages.get());
  } catch (...) {
    mapped_.erase(entry);
    throw;
  }
}

void memory_table::unmap(address at, std::size_t bytes) {
  check_range(at, bytes, "cannot unmap");
  const std::lock_guard lock(mutex_);
  const auto entry = mapped_.find(at);
  if (entry == mapped_.end()) {
    throw invalid_argument(
        fmt::format("cannot unmap {}: no mapping starts there", span_text(at, bytes)));
  }
  if (entry->second.bytes != bytes) {
    throw invalid_argument(fmt::format("cannot unmap {}: the mapping has {} and is unmapped whole",
                                       span_text(at, bytes), format_bytes(entry->second.bytes)));
  }
  unmap_pages(at, bytes);
  mapped_.erase(entry);
}

void memory_table::set_access(address at, std::size_t bytes, std::span<const access_grant> grants) {
  check_range(at, bytes, "cannot set access to");
  const bool to_cpus = std::any_of(grants.begin(), grants.end(), [](const access_grant& grant) {
    return grant.who.kind == tier::host;
  });
  for (const auto& grant : grants) check_location(grant.who);
  const std::lock_guard lock(mutex_);

  // What it will be, for each mapping of the range, before anything is touched.
  std::vector<std::pair<mapped_table::iterator, mapped>> changes;
  address covered = at;
  for (auto entry = mapped_.find(at);
       covered != at + bytes && entry != mapped_.end() && entry->first == covered; ++entry) {
    if (entry->second.bytes > at + bytes - covered) break;
    covered += entry->second.bytes;
    if (to_cpus && entry->second.kind == tier::device) {
      throw invalid_argument(
          fmt::format("cannot give CPUs access to {}: it is device memory",
                      span_text(entry->first, entry->second.bytes)),
          "CPUs reach HOST_NUMA memory only; copy, or put the segment in the host tier");
    }
    mapped after = entry->second;
    for (const auto& grant : grants) after.grants[grant.who] = grant.kind;
    after.access = most(after.grants);
    changes.emplace_back(entry, std::move(after));
  }
  if (covered != at + bytes) {
    throw invalid_argument(
        fmt::format("cannot set access to {}: whole mappings do not cover it from {} on",
                    span_text(at, bytes), format_address(covered)));
  }

  std::size_t done = 0;
  try {
    for (; done < changes.size(); ++done) {
      const auto& [entry, after] = changes[done];
      if (after.access != entry->second.access) protect(entry->first, after.bytes, after.access);
    }
  } catch (...) {
    while (done-- > 0) {
      const auto& entry = *changes[done].first;
      protect(entry.first, entry.second.bytes, entry.second.access);
    }
    throw;
  }
  for (auto& [entry, after] : changes) entry->second = std::move(after);
}

const memory_table::physical& memory_table::exportable(allocation_handle handle,
                                                       share_kind share) const {
  const physical& memory = find(handle);
  if (memory.share != share) {
    throw invalid_argument(fmt::format("handle {} was not created to be shared in this way",
                                       static_cast<std::uint64_t>(handle)),
                           share == share_kind::fd ? "create it with share_kind::fd"
                                                   : "create it with share_kind::fabric");
  }
  return memory;
}

unique_fd memory_table::export_fd(allocation_handle handle) const {
  const std::lock_guard lock(mutex_);
  return duplicate(exportable(handle, share_kind::fd).pages.get());
}

allocation_handle memory_table::import_fd(int fd, const allocation_request& request) {
  check_size(request.bytes, "cannot import");
  check_pages(fd, request.bytes);
  unique_fd pages = duplicate(fd);
  const std::lock_guard lock(mutex_);
  return add({std::move(pages), request.bytes, request.where.kind, request.share});
}

fabric_handle memory_table::export_fabric(allocation_handle handle) const {
  if (!fabric_) {
    throw unsupported("this host driver has no fabric handles",
                      "set host_driver_options::fabric (EVMM_HOST_FABRIC=1), or share by fd");
  }
  const std::lock_guard lock(mutex_);
  const physical& memory = exportable(handle, share_kind::fabric);
  return name_pages(memory.pages.get(), memory.bytes);
}

allocation_handle memory_table::import_fabric(const fabric_handle& shared,
                                              const allocation_request& request) {
  if (!fabric_) {
    throw unsupported("this host driver has no fabric handles",
                      "set host_driver_options::fabric (EVMM_HOST_FABRIC=1), or share by fd");
  }
  check_size(request.bytes, "cannot import");
  unique_fd pages = open_pages(shared, request.bytes);
  const std::lock_guard lock(mutex_);
  return add({std::move(pages), request.bytes, request.where.kind, request.share});
}

std::optional<std::string> memory_table::why_untouchable(address at, std::size_t bytes,
                                                         access_kind need) const {
  if (bytes > std::numeric_limits<address>::max() - at) {
    return fmt::format("{} bytes at {} go past the end of the addresses", bytes,
                       format_address(at));
  }
  const std::lock_guard lock(mutex_);
  const auto past = ranges_.lower_bound(at + bytes);
  if (past == ranges_.begin()) return std::nullopt;
  const auto& [base, size] = *std::prev(past);
  if (base + size <= at) return std::nullopt;

  address covered = at;
  auto entry = mapped_.upper_bound(at);
  if (entry != mapped_.begin()) --entry;
  for (; covered < at + bytes && entry != mapped_.end() && entry->first <= covered; ++entry) {
    if (entry->first + entry->second.bytes <= covered || entry->second.access < need) break;
    covered = entry->first + entry->second.bytes;
  }
  if (covered >= at + bytes) return std::nullopt;
  return fmt::format("{} may not be {} from {} on", span_text(at, bytes),
                     need == access_kind::read ? "read" : "written", format_address(covered));
}

}  // namespace evmm::host
