// SPDX-License-Identifier: Apache-2.0
// The hot path: what is served from cached blocks.
#include "lib/allocator/allocator_state.hpp"
#include "lib/memory/one_stream.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include <pthread.h>

namespace evmm {

namespace {

constexpr std::size_t most_bytes = std::size_t{1} << 60;

std::uint64_t next_id() {
  static std::atomic<std::uint64_t> last = 0;
  return ++last;
}

std::uint64_t drawn_number() {
  std::random_device source;
  return std::uint64_t{source()} << 32 | source();
}

address as_address(const void* at) noexcept {
  return reinterpret_cast<address>(at);
}

}  // namespace

namespace {

constexpr int entry_bits = 3;
[[gnu::tls_model("initial-exec")]] thread_local constinit caching_allocator::state::thread_entry
    last_found[1 << entry_bits] = {};

/// The allocators of the process. Never destroyed: a child may be forked as late as one likes.
struct registry {
  std::mutex guard;
  std::vector<caching_allocator::state*> all;
  static registry& its() {
    static auto* const only = new registry;
    return *only;
  }
};

/// A forked child forgets what its parent's thread found, so that its first request is refused, and
/// whose the addresses are, so that no free() waits for a lock that a thread of the parent has.
void forget_at_fork() {
  [[maybe_unused]] static const int watched =
      pthread_atfork([] { registry::its().guard.lock(); }, [] { registry::its().guard.unlock(); },
                     [] {
                       for (auto& entry : last_found) entry.allocator = 0;
                       for (auto* one : registry::its().all) one->pages.forget();
                       registry::its().guard.unlock();
                     });
}

}  // namespace

// Direct-mapped by stream.
caching_allocator::state::thread_entry& caching_allocator::state::thread_entry::of(
    native_stream stream) noexcept {
  return last_found[(reinterpret_cast<std::uintptr_t>(stream) * 0x9e3779b97f4a7c15u) >>
                    (64 - entry_bits)];
}

caching_allocator::state::state(std::shared_ptr<driver> driver, device_id its,
                                const allocator_options& wanted)
    : id(next_id()),
      shared_as(drawn_number()),
      on(driver ? std::move(driver) : throw invalid_argument("an allocator needs a driver")),
      device(its),
      total_bytes(on->usage(memory_location::on(its)).total_bytes),
      options((check(wanted), wanted)),
      events(on, its),
      happened(its),
      other(make_other_backend(on, its, wanted)),
      supply(on, its, options, pages,
             [this](trace_action action, const arena& where, address at, std::size_t bytes) {
               std::shared_ptr<const call_stack> stack;
               if (!happened.wanted()) return stack;
               if (happened.wants_stack(action)) stack = call_stack::here();
               happened.record({.action = action,
                                .at = at,
                                .bytes = bytes,
                                .stream = where.stream(),
                                .pool = where.pool().id,
                                .stack = stack});
               return stack;
             }) {
  forget_at_fork();
  pools.emplace(pool_id{}, std::make_unique<pool_record>());
  const std::lock_guard lock(registry::its().guard);
  registry::its().all.push_back(this);
}

caching_allocator::state::~state() {
  {
    const std::lock_guard lock(registry::its().guard);
    std::erase(registry::its().all, this);
  }
  std::size_t live = 0;
  for (arena* one : all_arenas) {
    live += static_cast<std::size_t>(one->allocated_count());
    log_failure("waiting for a stream before its memory goes", [&] {
      const device_scope here(*on, device);
      wait_for_users(*one);
    });
  }
  if (live > 0) {
    log().warn(
        "an allocator of DEVICE {} is destroyed with {} live allocations; their memory goes too",
        device.value, live);
  }
  for (arena* one : all_arenas) one->deferred.reset();
  for (arena* one : all_arenas) supply.drop(*one);
}

// --- arenas ------------------------------------------------------------------------------------

pool_id caching_allocator::state::routed_to(native_stream stream) const {
  for (auto at = routes.rbegin(); at != routes.rend(); ++at) {
    if (at->filter(stream)) return at->to;
  }
  return pool_id{};
}

arena& caching_allocator::state::find_arena(native_stream stream, size_class kind) {
  process.check();
  require_one_stream(stream);
  // Before the routes are looked at: what is found by older ones must not pass for newer.
  const std::uint64_t epoch = routing.load(std::memory_order_acquire);
  pool_id to{};
  bool routed = false;
  {
    const std::shared_lock lock(arenas_guard);
    to = routed_to(stream);
    routed = !routes.empty();
  }
  arena* found[2] = {nullptr, nullptr};
  const auto look_up = [&] {
    for (const size_class one : {size_class::small, size_class::large}) {
      const auto at = arenas.find({to, stream, one});
      found[static_cast<std::size_t>(one)] = at == arenas.end() ? nullptr : at->second.get();
    }
    return found[0] != nullptr && found[1] != nullptr;
  };
  bool have = false;
  {
    const std::shared_lock lock(arenas_guard);
    have = look_up();
  }
  if (!have) {
    const std::lock_guard slowly(slow);
    if (!pools.contains(to)) {  // its route has ended meanwhile
      const std::shared_lock lock(arenas_guard);
      to = routed_to(stream);
    }
    pool_record& owner = pool(to);
    owner.arenas.reserve(owner.arenas.size() + 2);
    const std::unique_lock lock(arenas_guard);
    if (!look_up()) {
      all_arenas.reserve(all_arenas.size() + 2);
      auto& account = accounts[{to, stream}];
      if (account == nullptr) {
        account = std::make_unique<ledger_account>();
        books.add(*account);
      }
      for (const size_class one : {size_class::small, size_class::large}) {
        auto& place = arenas[{to, stream, one}];
        if (place != nullptr) continue;
        place = std::make_unique<arena>(owner, stream, one, *account, rules, clock);
        all_arenas.push_back(place.get());
        owner.arenas.push_back(place.get());
      }
      look_up();
    }
  }
  // While allocations are routed, each asks the filters: they may answer by thread or by time.
  if (!routed) {
    thread_entry::of(stream) = {
        .allocator = id, .stream = stream, .epoch = epoch, .arenas = {found[0], found[1]}};
  }
  return *found[static_cast<std::size_t>(kind)];
}

// --- allocate ----------------------------------------------------------------------------------

void caching_allocator::state::note(trace_action action, const arena& where,
                                    const block& what) noexcept {
  const bool taken = action == trace_action::alloc;  // then its stack was taken just now
  happened.record({.action = action,
                   .at = what.at,
                   .bytes = what.requested,
                   .stream = where.stream(),
                   .pool = where.pool().id,
                   .stack = taken                          ? what.stack
                            : happened.wants_stack(action) ? call_stack::here()
                                                           : nullptr});
}

void* caching_allocator::state::hand_out(arena& from, block& taken, std::size_t bytes,
                                         std::unique_lock<spin_lock>& held) {
  taken.requested = bytes;
  const bool at_peak = from.account().allocate(from.kind(), taken.bytes, bytes);
  if (happened.wanted()) {
    taken.stack = happened.wants_stack(trace_action::alloc) ? call_stack::here() : nullptr;
    note(trace_action::alloc, from, taken);
  }
  const address at = taken.at;
  const bool oversize = rules.oversize(taken.bytes);
  taken.extra = static_cast<std::uint8_t>((oversize ? block::k_oversize : 0) |
                                          (taken.stack ? block::k_stack : 0));
  held.unlock();
  if (at_peak) books.settle(from.account());
  if (oversize) {
    const std::lock_guard lock(oversize_guard);
    oversize_allocations.add(1);
  }
  return reinterpret_cast<void*>(at);
}

block* caching_allocator::state::find_free(arena& from, std::size_t size) {
  std::unique_lock held(from.guard(), std::adopt_lock);
  block* found = nullptr;
  if (from.deferred) {
    poll(from);
    found = from.take_recent(size);
  }
  if (found == nullptr) found = from.take_free(size, from.pool().options.no_split);
  held.release();
  return found;
}

void* caching_allocator::state::allocate_slowly(arena& from, block* found, std::size_t size,
                                                std::size_t bytes) {
  std::unique_lock held(from.guard(), std::adopt_lock);
  if (found != nullptr) return hand_out(from, *found, bytes, held);
  held.unlock();
  const taken served = request(from, size, bytes, held);
  return hand_out(*served.from, *served.what, bytes, held);
}

void* caching_allocator::allocate(std::size_t bytes, native_stream stream) {
  state& s = *state_;
  if (bytes - 1 >= most_bytes - 1) [[unlikely]] {
    if (bytes == 0) return nullptr;
    throw invalid_argument(fmt::format("cannot allocate {} bytes: the limit is 1 EiB", bytes));
  }
  if (s.other) [[unlikely]]
    return s.allocate_elsewhere(bytes, stream);
  const std::size_t size = s.rules.round(bytes);
  arena& from = s.arena_for(stream, s.rules.class_of(size));
  from.guard().lock();
  block* found = from.take_recent(size);
  if (found == nullptr) found = s.find_free(from, size);
  if (found == nullptr || s.happened.wanted() || s.rules.oversize(found->bytes)) [[unlikely]]
    return s.allocate_slowly(from, found, size, bytes);
  found->requested = bytes;
  found->extra = 0;
  const bool at_peak = from.account().allocate(from.kind(), found->bytes, bytes);
  const address at = found->at;
  from.guard().unlock();
  if (at_peak) [[unlikely]]
    s.books.settle(from.account());
  return reinterpret_cast<void*>(at);
}

void* caching_allocator::allocate_at(void* where, std::size_t bytes, native_stream stream) {
  state& s = *state_;
  if (bytes == 0 || where == nullptr || s.other) return nullptr;
  if (bytes >= most_bytes) {
    throw invalid_argument(fmt::format("cannot allocate {} bytes: the limit is 1 EiB", bytes));
  }
  const address at = as_address(where);
  std::size_t size = s.rules.round(bytes);
  if (at % 512 != 0) return nullptr;
  arena& from = s.arena_for(stream, s.rules.class_of(size));
  std::unique_lock held(from.guard());
  if (from.pool().options.no_split) {
    from.merge_recent();
    const block* const whole = from.covering(at);
    if (whole == nullptr || whole->at != at || whole->bytes < size) return nullptr;
    size = whole->bytes;
  }
  block* const found = from.take_at(at, size);
  return found == nullptr ? nullptr : s.hand_out(from, *found, bytes, held);
}

// --- free --------------------------------------------------------------------------------------

block* caching_allocator::state::live_block(address at, std::unique_lock<spin_lock>& held) const {
  const segment_record* const segment = pages.find(at);
  if (segment == nullptr) return nullptr;
  const arena& owner = *segment->owner;
  held = std::unique_lock(owner.guard());
  block* const found = owner.find(at);
  if (found != nullptr && found->live()) return found;
  held.unlock();
  return nullptr;
}

void caching_allocator::state::complete(arena& owner, block& freed) noexcept {
  freed.other_streams.reset();
  owner.account().complete(owner.kind(), freed.bytes);
  if (happened.wanted()) note(trace_action::free_completed, owner, freed);
  freed.stack.reset();
  owner.put(&freed);
}

void caching_allocator::state::poll(arena& from) {
  if (!from.deferred || from.deferred->empty()) return;
  from.deferred->poll(*on, [&](block* freed) { complete(from, *freed); });
}

bool caching_allocator::state::in_capture(const arena& owner, const block& used) const {
  return capturing(owner.stream()) ||
         std::any_of(used.other_streams->begin(), used.other_streams->end(),
                     [&](native_stream stream) { return capturing(stream); });
}

void caching_allocator::state::defer(arena& owner, block& freed,
                                     std::unique_lock<spin_lock>& held) {
  const device_scope here(*on, device);
  const allocator_options& now = options.now();
  if (!owner.deferred) owner.deferred = std::make_unique<deferred_frees>();
  if (in_capture(owner, freed)) {
    std::vector<graph_node> last;
    if (now.graph_capture_record_stream_reuse) {
      last = on->capture_frontier(owner.stream());
      for (native_stream stream : *freed.other_streams) {
        const auto more = on->capture_frontier(stream);
        if (more.empty()) last.clear();  // not in the capture: nothing proves when it is over
        if (last.empty()) break;
        last.insert(last.end(), more.begin(), more.end());
      }
    }
    owner.deferred->add_captured(&freed, std::move(last));
  } else if (now.reuse == cross_stream_reuse::by_wait) {
    for (native_stream stream : *freed.other_streams) {
      const auto used = events.record(stream);
      on->wait(owner.stream(), used.get());
    }
    if (happened.wanted()) note(trace_action::free_requested, owner, freed);
    owner.account().free(owner.kind(), freed.bytes, freed.requested);
    freed.other_streams.reset();
    if (happened.wanted()) note(trace_action::free_completed, owner, freed);
    freed.stack.reset();
    owner.put(&freed);
    return;
  } else {
    owner.deferred->add(&freed, events);
  }
  if (happened.wanted()) note(trace_action::free_requested, owner, freed);
  owner.account().defer(owner.kind(), freed.bytes, freed.requested);
  freed.use = block_use::pending;
  held.unlock();
}

void caching_allocator::state::free(address at) {
  if (process.forked()) return;
  std::unique_lock<spin_lock> held;
  block* const freed = live_block(at, held);
  if (freed == nullptr) {
    throw invalid_argument(
        fmt::format("cannot free {}: it is no live allocation of this allocator (DEVICE {})",
                    format_address(at), device.value),
        "free each pointer that allocate() returned once, with the allocator that made it");
  }
  arena& owner = *freed->owner;
  const bool oversize = (freed->extra & block::k_oversize) != 0;
  if (freed->use == block_use::lent) {
    defer(owner, *freed, held);  // may fail: then nothing has happened
  } else {
    if (happened.wanted()) note(trace_action::free_requested, owner, *freed);
    owner.account().free(owner.kind(), freed->bytes, freed->requested);
    if (happened.wanted()) note(trace_action::free_completed, owner, *freed);
    freed->stack.reset();
    owner.put(freed);
  }
  if (oversize) {
    const std::lock_guard lock(oversize_guard);
    oversize_allocations.add(-1);
  }
}

void caching_allocator::free(void* pointer) {
  state& s = *state_;
  if (pointer == nullptr) return;
  if (s.other) [[unlikely]]
    return s.free_elsewhere(pointer);
  const address at = as_address(pointer);
  segment_record* const segment = s.pages.find(at);
  if (segment == nullptr || s.happened.wanted()) [[unlikely]]
    return s.free(at);
  arena& owner = *segment->owner;
  owner.guard().lock();
  block* const freed = owner.find(at);
  if (freed == nullptr || freed->use != block_use::allocated || freed->extra != 0) [[unlikely]] {
    owner.guard().unlock();
    return s.free(at);
  }
  owner.account().free(owner.kind(), freed->bytes, freed->requested);
  owner.put(freed);
  owner.guard().unlock();
}

void caching_allocator::record_stream(void* at, native_stream stream) {
  state& s = *state_;
  if (at == nullptr) return;
  s.process.check();
  require_one_stream(stream);
  if (s.other) return s.other->record_stream(at, stream);
  std::unique_lock<spin_lock> held;
  block* const used = s.live_block(as_address(at), held);
  if (used == nullptr || used->owner->stream() == stream) return;
  if (!used->other_streams) used->other_streams = std::make_unique<std::vector<native_stream>>();
  auto& streams = *used->other_streams;
  if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
  used->use = block_use::lent;
}

bool caching_allocator::owns(const void* at) const noexcept {
  if (state_->process.forked()) return false;
  if (state_->other) return state_->other->owns(at);
  std::unique_lock<spin_lock> held;
  return state_->live_block(as_address(at), held) != nullptr;
}

allocation_place caching_allocator::base_allocation(const void* at) const {
  state_->process.check();
  if (state_->other) return state_->other->place(at);
  std::unique_lock<spin_lock> held;
  const block* const live = state_->live_block(as_address(at), held);
  if (live == nullptr) {
    throw invalid_argument(fmt::format("{} is no live allocation of this allocator (DEVICE {})",
                                       format_address(as_address(at)), state_->device.value));
  }
  const auto backed = [](const block* b) { return b != nullptr && b->use != block_use::hole; };
  const block* first = live;
  while (backed(first->before)) first = first->before;
  const block* last = live;
  while (backed(last->after)) last = last->after;
  return {.base = reinterpret_cast<void*>(first->at),
          .bytes = last->at + last->bytes - first->at,
          .offset = live->at - first->at,
          .block_bytes = live->bytes};
}

void caching_allocator::copy(void* to, const void* from, std::size_t bytes, native_stream stream) {
  if (bytes == 0) return;
  const device_scope here(*state_->on, state_->device);
  state_->on->copy(as_address(to), as_address(from), bytes, stream);
}

// --- construction ------------------------------------------------------------------------------

caching_allocator::caching_allocator(std::shared_ptr<driver> on, device_id device,
                                     const allocator_options& options)
    : state_(std::make_unique<state>(std::move(on), device, options)) {}
caching_allocator::~caching_allocator() {
  // In a forked child memory, threads and locks are the parent's.
  if (state_->process.forked()) static_cast<void>(state_.release());
}

device_id caching_allocator::device() const noexcept {
  return state_->device;
}
driver& caching_allocator::on() const noexcept {
  return *state_->on;
}

}  // namespace evmm
