// SPDX-License-Identifier: Apache-2.0
#include "tests/unit/allocator_oracle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <iterator>

namespace evmm::test {

namespace {

std::string text_of(const live_block& block) {
  return fmt::format("[{:#x}, {:#x}) of {} bytes on stream {}, pool {}", block.begin(), block.end(),
                     block.bytes, static_cast<const void*>(block.stream), block.pool);
}

bool overlap(address begin, address end, address other_begin, address other_end) {
  return begin < other_end && other_begin < end;
}

std::string text_of(const statistic& each) {
  return fmt::format("{{current {}, peak {}, allocated {}, freed {}}}", each.current, each.peak,
                     each.allocated, each.freed);
}

}  // namespace

// --- marks ------------------------------------------------------------------------------------

void marker::write(driver& on, native_stream stream, void* at, std::size_t bytes,
                   std::uint64_t tag) {
  on.launch(stream, [at, bytes, tag] {
    const std::size_t part = std::min(bytes, sizeof tag);
    std::memcpy(static_cast<std::byte*>(at) + bytes - part, &tag, part);
    std::memcpy(at, &tag, part);
  });
}

void marker::check(driver& on, native_stream stream, void* at, std::size_t bytes, std::uint64_t tag,
                   const char* when) {
  on.launch(stream, [at, bytes, tag, when, shared = shared_] {
    const std::size_t part = std::min(bytes, sizeof tag);
    const bool first = std::memcmp(at, &tag, part) == 0;
    // Of a short block only the first mark is whole.
    const bool last =
        bytes < 2 * sizeof tag ||
        std::memcmp(static_cast<const std::byte*>(at) + bytes - part, &tag, part) == 0;
    if ((first && last) || shared->failures.fetch_add(1) != 0) return;
    std::uint64_t found = 0;
    std::memcpy(&found, at, part);
    const std::lock_guard lock(shared->mutex);
    shared->first = fmt::format("{}: block {} of {} bytes lost its {} mark: {:#x} instead of {:#x}",
                                when, at, bytes, first ? "last" : "first", found, tag);
  });
}

std::string marker::failure() const {
  const std::lock_guard lock(shared_->mutex);
  return shared_->first;
}

// --- blocks -----------------------------------------------------------------------------------

std::string allocator_oracle::add(const live_block& block) {
  std::string wrong;
  const auto next = live_.lower_bound(block.begin());
  if (next != live_.end() && next->second.begin() < block.end()) {
    wrong = "overlaps the live " + text_of(next->second);
  }
  if (next != live_.begin() && std::prev(next)->second.end() > block.begin()) {
    wrong = "overlaps the live " + text_of(std::prev(next)->second);
  }
  for (const auto& [pool, ranges] : graphs_) {
    if (pool == block.pool) continue;
    for (const auto& [begin, end] : ranges) {
      if (!overlap(block.begin(), block.end(), begin, end)) continue;
      wrong = fmt::format("overlaps [{:#x}, {:#x}), which is a graph's", begin, end);
    }
  }
  // In this order: another thread may open a gate in between, and none that is asked for closes.
  const gate_set mine = freed_.empty() ? gate_set{} : gates_.behind(block.stream);
  std::erase_if(freed_, [&](freed& each) {
    each.hazards = gates_.still_closed(each.hazards);
    return each.hazards.empty();
  });
  for (const freed& each : freed_) {
    if (!overlap(block.begin(), block.end(), each.begin, each.end) ||
        std::includes(mine.begin(), mine.end(), each.hazards.begin(), each.hazards.end())) {
      continue;
    }
    wrong = fmt::format("overlaps [{:#x}, {:#x}), which another stream still uses", each.begin,
                        each.end);
  }
  if (!wrong.empty()) return text_of(block) + " " + wrong;
  live_[block.begin()] = block;
  count(block, 1);
  return {};
}

void allocator_oracle::remove(const live_block& block, bool sure) {
  gate_set of_users;
  for (const native_stream user : block.users) of_users.merge(gates_.behind(user));
  gate_set hazards = of_users;
  hazards.merge(gates_.behind(block.stream));
  if (!hazards.empty()) freed_.push_back({block.begin(), block.end(), std::move(hazards)});
  if (!block.users.empty()) {
    waiting_.push_back({static_cast<std::int64_t>(block.block_bytes), std::move(of_users), sure});
  }
  count(block, -1);
  live_.erase(block.begin());
}

void allocator_oracle::keep(int pool, const live_block& block) {
  graphs_[pool].emplace_back(block.begin(), block.end());
}

std::size_t allocator_oracle::live_in(int pool) const {
  const auto known = pools_.find(pool);
  return known == pools_.end() ? 0 : known->second;
}

allocator_oracle::bounds allocator_oracle::active(bool by_event) const {
  bounds all = {.least = allocation_.all.current,
                .most = allocation_.all.current,
                .least_bytes = allocated_bytes_.all.current,
                .most_bytes = allocated_bytes_.all.current};
  for (const waits& each : waiting_) {
    ++all.most;
    all.most_bytes += each.bytes;
    if (!by_event || !each.sure || gates_.still_closed(each.gates).empty()) continue;
    ++all.least;
    all.least_bytes += each.bytes;
  }
  return all;
}

// --- statistics -------------------------------------------------------------------------------

void allocator_oracle::count(const live_block& block, int sign) {
  const auto add = [&](pool_statistic& to, std::size_t amount) {
    const auto change = sign * static_cast<std::int64_t>(amount);
    to.all.add(change);
    (block.small ? to.small_pool : to.large_pool).add(change);
  };
  add(allocation_, 1);
  add(allocated_bytes_, block.block_bytes);
  add(requested_bytes_, block.bytes);
  if (sign > 0) {
    ++pools_[block.pool];
  } else {
    --pools_[block.pool];
  }
}

void allocator_oracle::reset_peaks() {
  for (pool_statistic* each : {&allocation_, &allocated_bytes_, &requested_bytes_}) {
    for (statistic* part : {&each->all, &each->small_pool, &each->large_pool}) {
      part->peak = part->current;
    }
  }
}

void allocator_oracle::reset_totals() {
  for (pool_statistic* each : {&allocation_, &allocated_bytes_, &requested_bytes_}) {
    for (statistic* part : {&each->all, &each->small_pool, &each->large_pool}) {
      part->allocated = 0;
      part->freed = 0;
    }
  }
}

std::string allocator_oracle::compare(const allocator_statistics& told) const {
  std::string wrong;
  const auto compare_one = [&](const char* name, const char* part, const statistic& expected,
                               const statistic& found) {
    if (expected == found) return;
    wrong += fmt::format("{}.{} is {}, not {}\n", name, part, text_of(found), text_of(expected));
  };
  const auto compare_all = [&](const char* name, const pool_statistic& expected,
                               const pool_statistic& found) {
    compare_one(name, "all", expected.all, found.all);
    compare_one(name, "small_pool", expected.small_pool, found.small_pool);
    compare_one(name, "large_pool", expected.large_pool, found.large_pool);
  };
  compare_all("allocation", allocation_, told.allocation);
  compare_all("allocated_bytes", allocated_bytes_, told.allocated_bytes);
  compare_all("requested_bytes", requested_bytes_, told.requested_bytes);
  return wrong;
}

}  // namespace evmm::test
