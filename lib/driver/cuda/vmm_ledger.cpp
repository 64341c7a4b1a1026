// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/vmm_ledger.hpp"

#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <set>
#include <utility>

namespace evmm {

namespace {

std::string span_text(address at, std::size_t bytes) {
  return fmt::format("{} at {}", format_bytes(bytes), format_address(at));
}

std::size_t length_of(std::size_t range) {
  return range;
}
template <class Mapping>
std::size_t length_of(const Mapping& mapping) {
  return mapping.bytes;
}

/// The element of an address map that contains `at`, or end.
template <class Map>
auto containing(Map& map, address at) {
  const auto next = map.upper_bound(at);
  if (next == map.begin()) return map.end();
  const auto found = std::prev(next);
  return at - found->first < length_of(found->second) ? found : map.end();
}

}  // namespace

void vmm_ledger::add_range(address base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  ranges_.emplace(base, bytes);
}

void vmm_ledger::remove_range(address base, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = ranges_.find(base);
  if (found == ranges_.end()) {
    throw invalid_argument(
        fmt::format("cannot free {}: no range was reserved there", span_text(base, bytes)));
  }
  if (found->second != bytes) {
    throw invalid_argument(
        fmt::format("cannot free {}: {} were reserved there, and a range goes "
                    "back whole",
                    span_text(base, bytes), format_bytes(found->second)));
  }
  const auto mapped = mappings_.lower_bound(base);
  if (mapped != mappings_.end() && mapped->first - base < bytes) {
    throw invalid_argument(
        fmt::format("cannot free {}: {} are still mapped in it", span_text(base, bytes),
                    span_text(mapped->first, mapped->second.bytes)),
        "unmap first");
  }
  ranges_.erase(found);
}

void vmm_ledger::add_handle(allocation_handle handle, const allocation_request& request,
                            bool imported) {
  const std::lock_guard lock(mutex_);
  auto& entry = handles_[handle];
  // An import may return the very handle that the owner, or an earlier import, has.
  if (!entry.what) entry.what = std::make_shared<const memory>(memory{request, imported});
  ++entry.references;
}

const vmm_ledger::handle_entry& vmm_ledger::entry_of(allocation_handle handle) const {
  const auto found = handles_.find(handle);
  if (found == handles_.end()) {
    throw invalid_argument(fmt::format("handle {:#x} is not one of this driver, or was released",
                                       static_cast<std::uint64_t>(handle)));
  }
  return found->second;
}

std::shared_ptr<const vmm_ledger::memory> vmm_ledger::find(allocation_handle handle) const {
  const std::lock_guard lock(mutex_);
  return entry_of(handle).what;
}

std::shared_ptr<const vmm_ledger::memory> vmm_ledger::remove_handle(allocation_handle handle) {
  const std::lock_guard lock(mutex_);
  auto what = entry_of(handle).what;
  const auto found = handles_.find(handle);
  if (--found->second.references == 0) handles_.erase(found);
  return what;
}

void vmm_ledger::add_back(allocation_handle handle, std::shared_ptr<const memory> what) {
  const std::lock_guard lock(mutex_);
  auto& entry = handles_[handle];
  entry.what = std::move(what);
  ++entry.references;
}

void vmm_ledger::add_mapping(address at, std::size_t bytes, allocation_handle handle) {
  const std::lock_guard lock(mutex_);
  const auto& backing = entry_of(handle).what;
  if (backing->request.bytes != bytes) {
    throw invalid_argument(fmt::format("cannot map {} of a handle of {}: a handle is mapped whole",
                                       span_text(at, bytes), format_bytes(backing->request.bytes)));
  }
  const auto range = containing(ranges_, at);
  if (range == ranges_.end() || bytes > range->second - (at - range->first)) {
    throw invalid_argument(
        fmt::format("cannot map {}: {}", span_text(at, bytes),
                    range == ranges_.end()
                        ? "no range is reserved there"
                        : "it ends outside the reserved " + span_text(range->first, range->second)),
        "reserve the addresses first");
  }
  auto overlap = containing(mappings_, at);
  if (overlap == mappings_.end()) {
    const auto next = mappings_.lower_bound(at);
    if (next != mappings_.end() && next->first - at < bytes) overlap = next;
  }
  if (overlap != mappings_.end()) {
    throw invalid_argument(fmt::format("cannot map {}: {} are mapped there", span_text(at, bytes),
                                       span_text(overlap->first, overlap->second.bytes)),
                           "unmap first");
  }
  mappings_.emplace(at, mapping_entry{bytes, backing});
}

vmm_ledger::taken_mapping vmm_ledger::remove_mapping(address at, std::size_t bytes) {
  const std::lock_guard lock(mutex_);
  const auto found = mappings_.find(at);
  if (found == mappings_.end()) {
    throw invalid_argument(
        fmt::format("cannot unmap {}: no mapping begins there", span_text(at, bytes)));
  }
  if (found->second.bytes != bytes) {
    throw invalid_argument(fmt::format("cannot unmap {}: the mapping has {}, and goes whole",
                                       span_text(at, bytes), format_bytes(found->second.bytes)));
  }
  taken_mapping taken{at, bytes, std::move(found->second.what)};
  mappings_.erase(found);
  return taken;
}

void vmm_ledger::add_back(taken_mapping mapping) {
  const std::lock_guard lock(mutex_);
  mappings_.emplace(mapping.at, mapping_entry{mapping.bytes, std::move(mapping.backing)});
}

void vmm_ledger::check_access(address at, std::size_t bytes, bool by_cpu) const {
  const std::lock_guard lock(mutex_);
  address reached = at;
  for (auto next = mappings_.find(at); reached - at < bytes; ++next) {
    if (next == mappings_.end() || next->first != reached) {
      throw invalid_argument(fmt::format("cannot set access to {}: no mapping begins at {}",
                                         span_text(at, bytes), format_address(reached)));
    }
    if (by_cpu && next->second.what->request.where.kind != tier::host) {
      throw invalid_argument(
          fmt::format("cannot give CPUs access to {}: {} backs {}", span_text(at, bytes),
                      to_string(next->second.what->request.where),
                      span_text(next->first, next->second.bytes)),
          "CPUs reach HOST_NUMA memory only; copy, or put the segment in the host tier");
    }
    reached += next->second.bytes;
  }
  if (reached - at != bytes) {
    throw invalid_argument(
        fmt::format("cannot set access to {}: it ends inside a mapping that "
                    "goes on to {}",
                    span_text(at, bytes), format_address(reached)));
  }
}

std::size_t vmm_ledger::stretch(address at, std::size_t most) const {
  auto next = containing(mappings_, at);
  if (next == mappings_.end()) return 0;
  const memory_location where = next->second.what->request.where;
  std::size_t bytes = next->second.bytes - (at - next->first);
  while (bytes < most && ++next != mappings_.end() && next->first == at + bytes &&
         next->second.what->request.where == where) {
    bytes += next->second.bytes;
  }
  return std::min(bytes, most);
}

std::size_t vmm_ledger::check_work(address at, std::size_t bytes, std::string_view doing) const {
  const std::lock_guard lock(mutex_);
  const std::size_t first = stretch(at, bytes);
  if (first == 0) return bytes;  // memory of another kind
  for (std::size_t reached = first; reached < bytes;) {
    const std::size_t more = stretch(at + reached, bytes - reached);
    if (more == 0) {
      throw invalid_argument(fmt::format("cannot {} {}: nothing is mapped from {} on", doing,
                                         span_text(at, bytes), format_address(at + reached)),
                             "map the range and set access first");
    }
    reached += more;
  }
  return first;
}

std::size_t vmm_ledger::bytes_in_one_place(address at, std::size_t most) const {
  const std::lock_guard lock(mutex_);
  const std::size_t found = stretch(at, most);
  return found != 0 ? found : most;
}

std::size_t vmm_ledger::held(memory_location where) const {
  const std::lock_guard lock(mutex_);
  std::set<std::shared_ptr<const memory>> counted;
  const auto count = [&](const std::shared_ptr<const memory>& what) {
    const bool ours = !what->imported && what->request.where == where;
    return ours && counted.insert(what).second ? what->request.bytes : 0;
  };
  std::size_t bytes = 0;
  for (const auto& [handle, entry] : handles_) bytes += count(entry.what);
  for (const auto& [at, entry] : mappings_) bytes += count(entry.what);
  return bytes;
}

vmm_ledger::totals vmm_ledger::alive() const {
  const std::lock_guard lock(mutex_);
  return {.ranges = ranges_.size(), .handles = handles_.size(), .mappings = mappings_.size()};
}

}  // namespace evmm
