// SPDX-License-Identifier: Apache-2.0
// Requests that no cached block serves: the retry ladder.
#include "lib/allocator/allocator_state.hpp"
#include "lib/allocator/out_of_memory_text.hpp"
#include "lib/memory/one_stream.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <algorithm>
#include <limits>
#include <utility>

namespace evmm {

namespace {
constexpr std::size_t k_all = std::numeric_limits<std::size_t>::max();
}

std::size_t caching_allocator::state::limit() const {
  const double fraction = options.now().per_process_memory_fraction;
  return fraction >= 1 ? k_all
                       : static_cast<std::size_t>(fraction * static_cast<double>(total_bytes));
}

std::size_t caching_allocator::state::reservation_for(const arena& of, tier where) const {
  const allocator_options& now = options.now();
  reservation wanted = now.expandable_segments_reserve;
  if (const auto its_class = stream_classes.find(of.stream()); its_class != stream_classes.end()) {
    const auto found = now.expandable_segments_reserve_by_class.find(its_class->second);
    if (found != now.expandable_segments_reserve_by_class.end()) wanted = found->second;
  }
  std::size_t bytes =
      wanted.bytes != 0
          ? wanted.bytes
          : static_cast<std::size_t>(wanted.fraction * static_cast<double>(total_bytes));
  // The host tier may hold more than the device; addresses cost nothing.
  if (where == tier::host || (of.pool().options.may_span && of.pool().in_tier(tier::host))) {
    for (const numa_node node : on->numa_nodes()) {
      bytes += on->usage(memory_location::on(node)).total_bytes;
    }
  }
  return bytes;
}

bool caching_allocator::state::expandable(const arena& from) const {
  const pool_options& its = from.pool().options;
  return !its.functions && its.expandable_segments.value_or(options.now().expandable_segments);
}

/// More memory for `from`; its lock is held on success.
block* caching_allocator::state::extend(arena& from, std::size_t size, const supply_terms& terms,
                                        std::unique_lock<spin_lock>& held) {
  if (expandable(from)) {
    return supply.expand(from, size, reservation_for(from, terms.where), all_arenas, terms, held);
  }
  held = std::unique_lock(from.guard());
  block* found = nullptr;
  if (supply.add_segment(from, rules.segment_bytes(size), terms)) {
    // It serves the request it was made for, also where max_split_size would keep it from others.
    const segment_record& made = *from.segments.back();
    found = from.take_at(made.base, from.pool().options.no_split ? made.bytes : size);
  }
  if (found == nullptr) held.unlock();
  return found;
}

bool caching_allocator::state::ask_for_frees(std::unique_lock<std::recursive_mutex>& lock) {
  std::vector<std::shared_ptr<std::function<bool()>>> callbacks;
  {
    const std::lock_guard observers(observers_guard);
    for (const auto& callback : shortage_callbacks) {
      if (auto alive = callback.lock()) callbacks.push_back(std::move(alive));
    }
  }
  // A callback that allocates, and is short of memory itself, would be asked for ever.
  thread_local bool asking = false;
  if (callbacks.empty() || asking) return false;
  const struct asking_scope {
    asking_scope() { asking = true; }
    ~asking_scope() { asking = false; }
  } scope;
  bool freed = false;
  lock.unlock();
  for (const auto& callback : callbacks) freed = (*callback)() || freed;
  lock.lock();
  return freed;
}

void caching_allocator::state::collect_garbage() {
  const double threshold = options.now().garbage_collection_threshold;
  if (threshold <= 0) return;
  const std::size_t allowed = std::min(limit(), total_bytes);
  const auto keep = static_cast<std::size_t>(threshold * static_cast<double>(allowed));
  // What was freed longest ago, half of the ages at a time.
  for (std::uint64_t now = clock.load(), age = now; age > 0; age /= 2) {
    const std::size_t held_bytes = supply.held_bytes(tier::device);
    if (held_bytes <= keep) return;
    std::size_t excess = held_bytes - keep;
    for (arena* one : all_arenas) {
      if (excess == 0) break;
      if (!one->pool().in_tier(tier::device)) continue;
      const std::lock_guard held(one->guard());
      // A stream that has nothing here need not exist any more.
      if (supply.releasable(*one) == 0 || capturing(one->stream())) continue;
      if (!on->idle(one->stream())) continue;
      excess -=
          std::min(excess, supply.give_back(*one, excess, tier::device, now - age / 2, false));
    }
    if (age == 1) break;
  }
}

caching_allocator::state::taken caching_allocator::state::take_from_pools(
    arena& from, std::size_t size, std::unique_lock<spin_lock>& held) {
  if (from.pool().id != pool_id{}) return {};
  for (const auto& [its_id, its] : pools) {
    if (!its->options.use_on_oom || !its->may_give()) continue;
    for (arena* one : its->arenas) {
      if (one->stream() != from.stream() || one->kind() != from.kind()) continue;
      held = std::unique_lock(one->guard());
      if (block* const found = one->take_free(size, its->options.no_split)) return {one, found};
      held.unlock();
    }
  }
  return {};
}

/// Locks an arena whose stream is past all use of what is free in it. Another thread may allocate,
/// use and free between a wait and the lock: then it is waited for again.
std::unique_lock<spin_lock> caching_allocator::state::lock_quiet(arena& one) {
  for (int attempt = 0;; ++attempt) {
    on->synchronize(one.stream());
    std::unique_lock held(one.guard());
    if (on->idle(one.stream())) return held;
    if (attempt == 3) {
      on->synchronize(one.stream());
      return held;
    }
  }
}

std::size_t caching_allocator::state::give_back(std::size_t wanted, std::optional<tier> where,
                                                const pool_record* only) {
  std::size_t given = 0;
  for (const bool idle_only : {true, false}) {
    for (arena* one : all_arenas) {
      if (given >= wanted) return given;
      if (only != nullptr && &one->pool() != only) continue;
      if (where && !one->pool().in_tier(*where)) continue;
      {
        const std::lock_guard held(one->guard());
        if (!one->pool().may_give() || supply.releasable(*one) == 0) continue;
      }
      if (capturing(one->stream())) continue;
      if (idle_only && !on->idle(one->stream())) continue;
      const auto held = lock_quiet(*one);
      given += supply.give_back(*one, wanted - given, where, k_all, true);
    }
  }
  return given;
}

arena* caching_allocator::state::wait_for_event(arena& first, bool others) {
  arena* chosen = nullptr;
  native_event oldest = nullptr;
  std::uint64_t order = 0;
  const auto consider = [&](arena& one) {
    const std::lock_guard held(one.guard());
    const event_pool::lease* const its = one.deferred ? one.deferred->oldest() : nullptr;
    if (its == nullptr || (chosen != nullptr && its->order() > order)) return;
    chosen = &one;
    oldest = its->get();
    order = its->order();
  };
  consider(first);
  if (chosen == nullptr && others) {
    for (arena* one : all_arenas) consider(*one);
  }
  if (chosen == nullptr) return nullptr;
  // Somebody else may complete the block meanwhile and use the event again: then this waits for
  // longer than it must, no more.
  on->synchronize(oldest);
  const std::lock_guard held(chosen->guard());
  poll(*chosen);
  return chosen;
}

void caching_allocator::state::wait_for_users(arena& going) {
  if (!going.empty() && !capturing(going.stream())) on->synchronize(going.stream());
  settle_captured();
  while (wait_for_event(going, false) != nullptr) {
  }
  for (const segment_record* segment : going.segments) {
    for (const block* b = segment->first; b != nullptr; b = b->after) {
      if (b->use != block_use::lent) continue;
      for (native_stream stream : *b->other_streams) {
        if (!capturing(stream)) on->synchronize(stream);
      }
    }
  }
}

caching_allocator::state::taken caching_allocator::state::request(
    arena& from, std::size_t size, std::size_t bytes, std::unique_lock<spin_lock>& held) {
  process.check();
  const device_scope here(*on, device);  // whose default stream is meant
  std::unique_lock lock(slow);
  // Whose streams ask for nothing any more would wait for ever, and count as live.
  for (arena* one : all_arenas) {
    const std::lock_guard theirs(one->guard());
    poll(*one);
  }
  // What is live, for the rule of when to make memory; with no arena locked.
  const auto before = static_cast<std::size_t>(books.peak_active_bytes());
  const std::size_t next = static_cast<std::size_t>(books.active_bytes()) + size;
  // A pool may have gone since its arena was found: then the request goes where it would go now.
  arena& now = pools.contains(from.pool().id) ? from : find_arena(from.stream(), from.kind());
  try {
    return find_memory(now, size, bytes, {before, next}, held, lock);
  } catch (const out_of_memory&) {
    // fail() has counted and told, and let go of the lock; a reservation too small did neither.
    if (lock.owns_lock()) {
      if (held.owns_lock()) held.unlock();
      ++ooms;
      const oom_report report = report_of(bytes, false);
      record(report, now);
      lock.unlock();
      tell(report);
    }
    throw;
  }
}

caching_allocator::state::taken caching_allocator::state::find_memory(
    arena& from, std::size_t size, std::size_t bytes, const live_bytes& live,
    std::unique_lock<spin_lock>& held, std::unique_lock<std::recursive_mutex>& lock) {
  clock.fetch_add(1, std::memory_order_relaxed);
  const std::size_t most_live = std::max(live.peak, live.next);
  const auto slack =
      static_cast<std::size_t>(options.now().recycle_slack * static_cast<double>(most_live));
  const bool whole = from.pool().options.no_split;
  const auto try_free = [&]() -> block* {
    held = std::unique_lock(from.guard());
    poll(from);
    block* found = from.take_free(size, whole);
    if (found == nullptr && expandable(from)) found = supply.claim(from, size);
    if (found == nullptr) held.unlock();
    return found;
  };
  // 1. Another thread may have freed, or events may be over.
  if (block* const found = try_free()) return {&from, found};
  const bool in_capture = from.pool().captures > 0;
  if (in_capture && options.now().graph_capture_record_stream_reuse) {
    const auto frontier = on->capture_frontier(from.stream());
    {
      const std::lock_guard mine(from.guard());
      if (from.deferred) {
        from.deferred->poll_captured(*on, frontier, [&](block* freed) { complete(from, *freed); });
      }
    }
    if (block* const found = try_free()) return {&from, found};
  }
  // 2. Whoever offered to free something.
  const bool freed = ask_for_frees(lock);
  static_cast<void>(pool(from.pool().id));  // it may have gone; its number is not given again
  if (freed) {
    if (block* const found = try_free()) return {&from, found};
  }
  // 3. Old memory, where more is held than wanted.
  if (!in_capture) collect_garbage();

  const std::vector<tier>& tiers = from.pool().options.tiers;
  const bool own_memory = from.pool().options.functions.has_value();
  bool retried = false;
  const std::uint64_t made_before = supply.last_serial();
  const auto give_up = [&](bool rejected) {
    {
      // What was made for it would be held for nothing.
      const std::lock_guard mine(from.guard());
      if (!in_capture && !capturing(from.stream()) && on->idle(from.stream())) {
        supply.give_back_made(from, made_before);
      }
    }
    fail(from, size, bytes, rejected, lock);
  };
  for (const tier where : tiers) {
    // What the addresses of one tier cannot hold may lie in the next.
    if (where != tiers.back() && expandable(from) && size > reservation_for(from, where)) continue;
    supply_terms terms{.where = where,
                       .make_up_to = most_live + slack,
                       .growing = live.next > live.peak,
                       .limit = where == tier::device ? limit() : k_all,
                       .in_parts = from.pool().options.may_span && where != tiers.back()};
    if (where == tier::device && options.now().throw_on_device_oom && !own_memory) {
      const std::size_t device_free = on->usage(memory_location::on(device)).free_bytes;
      const std::size_t held_bytes = supply.held_bytes(tier::device);
      const std::size_t allowed = terms.limit - std::min(terms.limit, held_bytes);
      const std::size_t needed = expandable(from) ? size : rules.segment_bytes(size);
      if (std::min(device_free, allowed) < needed) {
        // What is held may move to where it is needed: the driver is asked for no memory.
        terms.may_make = false;
        if (expandable(from)) {
          if (block* const found = extend(from, size, terms, held)) return {&from, found};
        }
        if (const taken found = take_from_pools(from, size, held); found.what != nullptr) {
          return found;
        }
        if (where == tiers.back()) give_up(true);
        continue;
      }
    }
    // 4. New memory, or memory that nobody uses any more.
    if (block* const found = extend(from, size, terms, held)) return {&from, found};
    // 5. Pools that help out.
    if (const taken found = take_from_pools(from, size, held); found.what != nullptr) return found;
    if (in_capture) continue;
    settle_captured();
    // 6. Blocks that wait for other streams, one event at a time.
    while (arena* const one = wait_for_event(from)) {
      if (block* const found = one == &from ? try_free() : extend(from, size, terms, held)) {
        return {&from, found};
      }
      if (const taken found = take_from_pools(from, size, held); found.what != nullptr) {
        return found;
      }
    }
    // 7. Memory of other streams, behind their work; then whatever is cached anywhere.
    if (!std::exchange(retried, true)) {
      ++retries;
      ++full_waits;
    }
    if (expandable(from)) {  // beside what the waits have freed, too
      terms.may_wait = true;
      if (block* const found = extend(from, size, terms, held)) return {&from, found};
    }
    for (const std::size_t enough : {size, k_all}) {
      if (give_back(enough, where) == 0) break;
      if (block* const found = extend(from, size, terms, held)) return {&from, found};
    }
  }
  give_up(false);
  return {};  // is not reached
}

oom_report caching_allocator::state::report_of(std::size_t bytes, bool rejected) const {
  const memory_usage usage = on->usage(memory_location::on(device));
  return {.device = device,
          .requested_bytes = bytes,
          .allowed_bytes = std::min(limit(), usage.total_bytes),
          .total_bytes = usage.total_bytes,
          .free_bytes = usage.free_bytes,
          .rejected = rejected};
}

void caching_allocator::state::record(const oom_report& report, const arena& from) {
  if (!happened.wanted()) return;
  happened.record(
      {.action = trace_action::oom,
       .at = report.free_bytes,
       .bytes = report.requested_bytes,
       .stream = from.stream(),
       .pool = from.pool().id,
       .stack = happened.wants_stack(trace_action::oom) ? call_stack::here() : nullptr});
}

void caching_allocator::state::tell(const oom_report& report) {
  std::vector<std::shared_ptr<std::function<void(const oom_report&)>>> observers;
  {
    const std::lock_guard guard(observers_guard);
    for (const auto& observer : oom_observers) {
      if (auto alive = observer.lock()) observers.push_back(std::move(alive));
    }
  }
  for (const auto& observer : observers) {
    log_failure("telling of an out-of-memory", [&] { (*observer)(report); });
  }
}

void caching_allocator::state::free_elsewhere(void* pointer) {
  if (!process.forked()) other->free(pointer);
}

void* caching_allocator::state::allocate_elsewhere(std::size_t bytes, native_stream stream) {
  process.check();
  require_one_stream(stream);
  try {
    return other->allocate(bytes, stream, limit());
  } catch (const out_of_memory&) {
    {
      const std::lock_guard lock(slow);
      ++ooms;
    }
    tell(report_of(bytes, false));
    throw;
  }
}

void caching_allocator::state::fail(const arena& from, std::size_t size, std::size_t bytes,
                                    bool rejected, std::unique_lock<std::recursive_mutex>& lock) {
  ++ooms;
  if (rejected) ++rejections;
  const oom_report report = report_of(bytes, rejected);
  const out_of_memory failure = out_of_memory_text(*this, from, size, report);
  record(report, from);
  lock.unlock();
  tell(report);
  throw failure;
}

}  // namespace evmm
