// SPDX-License-Identifier: Apache-2.0
// Allocations in other processes.
#include "lib/allocator/allocator_state.hpp"
#include "lib/memory/region_rules.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <cstring>
#include <span>
#include <type_traits>
#include <utility>

#include <unistd.h>

namespace evmm {

namespace {

/// What an ipc_handle says, as it travels: this, then one `shared_part` for each descriptor.
struct header {
  std::uint64_t magic;
  std::uint64_t process;
  std::uint64_t allocator;
  std::uint64_t offset;  ///< of the allocation in the first part
  std::uint64_t bytes;   ///< of the allocation
  std::uint64_t parts;
};
struct shared_part {
  std::uint64_t serial;  ///< of the handle in its allocator: memory that moved is other memory
  std::uint64_t bytes;
  std::int32_t tier_of;
  std::int32_t index;
};
static_assert(std::is_trivially_copyable_v<header> && std::is_trivially_copyable_v<shared_part>);
constexpr std::uint64_t k_magic = 0x65766d6d2d697063;  // "evmm-ipc"

template <class T>
void append(std::string& to, const T& value) {
  to.append(reinterpret_cast<const char*>(&value), sizeof value);
}

template <class T>
T take(std::string_view& from) {
  if (from.size() < sizeof(T)) {
    throw invalid_argument(
        fmt::format("an IPC handle ends {} bytes early", sizeof(T) - from.size()));
  }
  T value;
  std::memcpy(&value, from.data(), sizeof value);
  from.remove_prefix(sizeof value);
  return value;
}

}  // namespace

/// Another process's allocation, mapped here.
struct caching_allocator::state::shared_mapping {
  std::shared_ptr<driver> on;  ///< outlives what follows
  address_range range;
  std::vector<mapping> parts = {};
};

void caching_allocator::enable_peer(device_id peer) {
  state& s = *state_;
  if (peer == s.device) return;
  const auto lock = s.enter();
  if (s.other) s.other->enable_peer(peer);
  s.supply.enable_peer(peer);
  const access_grant grant{memory_location::on(peer)};
  const std::lock_guard imports(s.imports_guard);
  for (const auto& [handle, its] : s.imports) {
    const auto alive = its.lock();
    if (!alive) continue;
    for (const mapping& part : alive->parts) {
      s.on->set_access(part.base(), part.size(), std::span(&grant, 1));
    }
  }
}

ipc_handle caching_allocator::export_allocation(const void* at) {
  state& s = *state_;
  if (s.other) {
    throw unsupported("this backend cannot share allocations", "use backend:native");
  }
  const auto lock = s.enter();
  std::unique_lock<spin_lock> held;
  const block* const live = s.live_block(reinterpret_cast<address>(at), held);
  if (live == nullptr) {
    throw invalid_argument(fmt::format("cannot export {}: it is no live allocation",
                                       format_address(reinterpret_cast<address>(at))));
  }
  std::vector<const physical_memory*> memories;
  std::vector<std::uint64_t> serials;
  address first = live->in->base;
  if (live->in->expandable()) {
    const expandable_range& range = *live->in->range;
    for (address here = live->at; here < live->at + live->bytes;) {
      const span_record& span = *range.span_at(here);
      if (memories.empty()) first = span.at();
      memories.push_back(span.what.memory.get());
      serials.push_back(span.what.serial);
      here = span.end();
    }
  } else if (const memory_ptr& memory = live->in->memory->memory()) {
    memories.push_back(memory.get());
    serials.push_back(live->in->memory->serial);
  } else {
    throw unsupported("memory from a pool's own functions cannot be shared");
  }
  header head{.magic = k_magic,
              .process = static_cast<std::uint64_t>(getpid()),
              .allocator = s.shared_as,
              .offset = live->at - first,
              .bytes = live->bytes,
              .parts = memories.size()};
  ipc_handle made;
  append(made.bytes, head);
  std::vector<unique_fd> fds;
  for (std::size_t i = 0; i < memories.size(); ++i) {
    const memory_location where = memories[i]->location();
    append(made.bytes, shared_part{.serial = serials[i],
                                   .bytes = memories[i]->size(),
                                   .tier_of = static_cast<std::int32_t>(where.kind),
                                   .index = where.index});
    fds.push_back(memories[i]->export_fd());
  }
  made.fds.reserve(fds.size());
  for (unique_fd& fd : fds) made.fds.push_back(fd.release());
  return made;
}

std::shared_ptr<void> caching_allocator::import_allocation(const ipc_handle& handle) {
  state& s = *state_;
  std::string_view rest = handle.bytes;
  const auto head = take<header>(rest);
  if (head.magic != k_magic) throw invalid_argument("these bytes are no IPC handle of evmm");
  if (head.parts == 0 || head.parts != handle.fds.size()) {
    throw invalid_argument(
        fmt::format("the IPC handle has {} parts, but {} descriptors came with it", head.parts,
                    handle.fds.size()),
        "pass the descriptors in their order");
  }
  auto slowly = s.enter();
  const std::lock_guard lock(s.imports_guard);
  // A peer that is enabled from here on finds the import in the table.
  const std::vector<device_id> peers = s.supply.peers();
  slowly.unlock();
  const auto pointer_to = [&](std::shared_ptr<state::shared_mapping> its) {
    void* const at = reinterpret_cast<void*>(its->range.base() + head.offset);
    return std::shared_ptr<void>(std::move(its), at);
  };
  if (const auto known = s.imports.find(handle.bytes); known != s.imports.end()) {
    if (auto alive = known->second.lock()) return pointer_to(std::move(alive));
  }
  std::vector<shared_part> parts;
  std::size_t total = 0;
  for (std::uint64_t i = 0; i < head.parts; ++i) {
    parts.push_back(take<shared_part>(rest));
    total += parts.back().bytes;
  }
  if (!rest.empty()) {
    throw invalid_argument(
        fmt::format("an IPC handle of {} bytes has {} more than its {} parts need",
                    handle.bytes.size(), rest.size(), head.parts),
        "pass the bytes of one export_allocation()");
  }
  if (head.offset > total || head.bytes > total - head.offset) {
    throw invalid_argument("the IPC handle's allocation does not lie in its memory");
  }
  auto made = std::make_shared<state::shared_mapping>(
      state::shared_mapping{s.on, address_range(*s.on, total), {}});
  made->parts.reserve(parts.size());
  const access_rule access = region_access(*s.on, s.device, peers, true);
  address at = made->range.base();
  for (std::size_t i = 0; i < parts.size(); ++i) {
    const memory_location where{static_cast<tier>(parts[i].tier_of), parts[i].index};
    const auto memory = physical_memory::import_fd(
        *s.on, handle.fds[i],
        {.bytes = parts[i].bytes, .where = where, .share = s.options.now().share});
    made->parts.emplace_back(*s.on, at, memory, access(where));
    at += parts[i].bytes;
  }
  std::erase_if(s.imports, [](const auto& one) { return one.second.expired(); });
  s.imports[handle.bytes] = made;
  return pointer_to(std::move(made));
}

}  // namespace evmm
