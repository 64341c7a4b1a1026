// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/async_pool.hpp"

#include "lib/driver/host/pages.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

namespace evmm::host {

namespace {
constexpr std::size_t k_page = 4096;
}  // namespace

async_pool::async_pool(memory_table& memory, device_id device)
    : memory_(memory), where_(memory_location::on(device)) {}

async_pool::~async_pool() {
  for (const auto& [at, each] : blocks_) {
    free_addresses(at, each.bytes);
    memory_.give_back(where_, each.bytes);
  }
}

std::map<address, async_pool::block>::iterator async_pool::fitting(std::size_t bytes,
                                                                   native_stream stream) {
  auto best = blocks_.end();
  for (auto each = blocks_.begin(); each != blocks_.end(); ++each) {
    const block& known = each->second;
    if (known.allocated || known.bytes < bytes || known.bytes / 2 > bytes) continue;
    if (known.freed_on != stream && !known.past->reached()) continue;
    if (best == blocks_.end() || known.bytes < best->second.bytes) best = each;
  }
  return best;
}

address async_pool::allocate(std::size_t bytes, native_stream stream) {
  constexpr const char* doing = "cannot allocate in stream order";
  if (bytes == 0) throw invalid_argument(fmt::format("{}: 0 bytes", doing));
  if (bytes > std::numeric_limits<std::size_t>::max() / 2) {
    throw out_of_memory(fmt::format("{} {} bytes on {}", doing, bytes, to_string(where_)),
                        "ask for less");
  }
  const std::size_t whole = (bytes + k_page - 1) / k_page * k_page;
  const std::lock_guard lock(mutex_);
  address at = 0;
  if (const auto found = fitting(whole, stream); found != blocks_.end()) {
    found->second = {found->second.bytes, true};
    at = found->first;
  } else {
    if (memory_.usage(where_).free_bytes < whole) trim_locked(0);
    memory_.take(where_, whole, doing);
    try {
      at = map_private(whole);
      blocks_.emplace(at, block{whole});
    } catch (...) {
      if (at != 0) free_addresses(at, whole);
      memory_.give_back(where_, whole);
      throw;
    }
    totals_.reserved_bytes += whole;
    totals_.reserved_peak = std::max(totals_.reserved_peak, totals_.reserved_bytes);
  }
  totals_.used_peak = std::max(totals_.used_peak, used_bytes());
  return at;
}

bool async_pool::free(address at, native_stream stream,
                      const std::function<std::shared_ptr<completion>()>& mark) {
  const std::lock_guard lock(mutex_);
  const auto found = blocks_.find(at);
  if (found == blocks_.end() || !found->second.allocated) return false;
  auto past = mark();
  found->second.past = std::move(past);
  found->second.freed_on = stream;
  found->second.allocated = false;
  return true;
}

void async_pool::trim(std::size_t keep_bytes) {
  const std::lock_guard lock(mutex_);
  trim_locked(keep_bytes);
}

void async_pool::trim_locked(std::size_t keep_bytes) noexcept {
  for (auto each = blocks_.begin(); each != blocks_.end();) {
    if (totals_.reserved_bytes <= keep_bytes) return;
    const auto current = each++;
    if (current->second.used()) continue;
    free_addresses(current->first, current->second.bytes);
    memory_.give_back(where_, current->second.bytes);
    totals_.reserved_bytes -= current->second.bytes;
    blocks_.erase(current);
  }
}

std::size_t async_pool::used_bytes() const {
  std::size_t bytes = 0;
  for (const auto& [at, each] : blocks_) bytes += each.used() ? each.bytes : 0;
  return bytes;
}

async_memory async_pool::usage() const {
  const std::lock_guard lock(mutex_);
  async_memory now = totals_;
  now.used_bytes = used_bytes();
  return now;
}

}  // namespace evmm::host
