// SPDX-License-Identifier: Apache-2.0
// Pools, routing, graph captures and checkpoints.
#include "lib/allocator/allocator_state.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <set>
#include <thread>
#include <utility>

namespace evmm {

// --- pools -------------------------------------------------------------------------------------

pool_record& caching_allocator::state::pool(pool_id its) const {
  const auto found = pools.find(its);
  if (found == pools.end()) {
    throw invalid_argument(fmt::format("there is no pool {}", static_cast<std::uint64_t>(its)),
                           "a pool goes when its last user released it and nothing lives in it");
  }
  return *found->second;
}

pool_id caching_allocator::create_pool(const pool_options& options) {
  state& s = *state_;
  if (s.other) {
    throw unsupported("pools need the native backend", "unset backend, or set backend:native");
  }
  const auto& tiers = options.tiers;
  if (tiers.empty() || tiers.size() > 2 || (tiers.size() == 2 && tiers[0] == tiers[1])) {
    throw invalid_argument("a pool's tiers are device, host, or both, in order of preference");
  }
  if (options.functions && (!options.functions->allocate || !options.functions->free)) {
    throw invalid_argument("pool_functions needs both `allocate` and `free`");
  }
  const auto lock = s.enter();
  auto made = std::make_unique<pool_record>();
  made->id = pool_id{s.next_pool};
  made->options = options;
  const pool_id its = made->id;
  s.pools.emplace(its, std::move(made));
  ++s.next_pool;
  return its;
}

void caching_allocator::retain_pool(pool_id its) {
  const auto lock = state_->enter();
  pool_record& one = state_->pool(its);
  if (one.users == 0) {
    throw invalid_argument(fmt::format("pool {} was released", static_cast<std::uint64_t>(its)));
  }
  ++one.users;
}

void caching_allocator::release_pool(pool_id its) {
  state& s = *state_;
  const auto lock = s.enter();
  pool_record& one = s.pool(its);
  if (its == pool_id{} || one.users == 0) {
    throw invalid_argument(
        fmt::format("pool {} has no user to release it", static_cast<std::uint64_t>(its)));
  }
  if (one.users == 1 && one.captured) s.wait_for_replays();
  if (--one.users == 0) s.drop_if_unused(one);
}

/// Waits for graphs that were launched on any stream with memory here: their nodes use their pool's
/// memory, of which its own streams know nothing.
void caching_allocator::state::wait_for_replays() {
  const device_scope here(*on, device);
  for (arena* one : all_arenas) {
    {
      const std::lock_guard held(one->guard());
      if (one->empty()) continue;
    }
    if (!capturing(one->stream())) on->synchronize(one->stream());
  }
}

int caching_allocator::pool_use_count(pool_id its) const {
  const auto lock = state_->enter();
  return state_->pool(its).users;
}

/// Gives back all memory of an arena; false when something lives there. A thread that was sent here
/// before a route ended may still take what is free. Empty is for good: memory comes under `slow`.
bool caching_allocator::state::make_empty(arena& one) {
  {
    const std::lock_guard held(one.guard());
    if (one.empty()) return true;
  }
  if (capturing(one.stream())) return false;
  const auto held = lock_quiet(one);
  supply.give_back(one, std::numeric_limits<std::size_t>::max(), {},
                   std::numeric_limits<std::uint64_t>::max(), true);
  return one.empty();
}

/// A pool without users in which nothing lives goes at once; else its free memory serves others
/// (pool_record::may_give) and it goes when it can.
void caching_allocator::state::drop_if_unused(pool_record& gone) {
  if (gone.users > 0 || gone.captures > 0 || gone.id == pool_id{}) return;
  for (arena* one : gone.arenas) {
    const std::lock_guard held(one->guard());
    poll(*one);
    if (one->allocated_count() > 0 || (one->deferred && !one->deferred->empty())) return;
  }
  {
    const std::shared_lock lock(arenas_guard);
    for (const route& one : routes) {
      if (one.to == gone.id) return;
    }
  }
  const device_scope here(*on, device);
  for (arena* one : gone.arenas) {
    if (!make_empty(*one)) return;
  }
  for (arena* one : gone.arenas) {
    const std::lock_guard held(one->guard());
    supply.drop(*one);
    one->retire();
  }
  const std::unique_lock lock(arenas_guard);
  route_changed();
  for (auto at = accounts.begin(); at != accounts.end();) {
    if (at->first.first != gone.id) {
      ++at;
      continue;
    }
    books.remove(*at->second);
    retired_accounts.push_back(std::move(at->second));
    at = accounts.erase(at);
  }
  for (arena* one : gone.arenas) {
    std::erase(all_arenas, one);
    retired_arenas.push_back(std::move(arenas[{gone.id, one->stream(), one->kind()}]));
    arenas.erase({gone.id, one->stream(), one->kind()});
  }
  pools_gone.push_back(std::move(pools[gone.id]));
  pools.erase(gone.id);
}

// --- routing -----------------------------------------------------------------------------------

void caching_allocator::begin_allocate_to_pool(pool_id its,
                                               std::function<bool(native_stream)> filter) {
  state& s = *state_;
  state::check_callable(filter, "begin_allocate_to_pool");
  const auto lock = s.enter();
  s.pool(its);
  const std::unique_lock guard(s.arenas_guard);
  s.routes.push_back({its, std::move(filter), std::this_thread::get_id()});
  s.route_changed();
}

void caching_allocator::begin_allocate_to_pool(pool_id its) {
  begin_allocate_to_pool(its, [thread = std::this_thread::get_id()](native_stream) {
    return std::this_thread::get_id() == thread;
  });
}

void caching_allocator::end_allocate_to_pool(pool_id its) {
  state& s = *state_;
  const auto lock = s.enter();
  const std::unique_lock guard(s.arenas_guard);
  // The thread's own, where several threads go to one pool.
  auto last = std::find_if(s.routes.rbegin(), s.routes.rend(), [&](const state::route& one) {
    return one.to == its && one.begun_by == std::this_thread::get_id();
  });
  if (last == s.routes.rend()) {
    last = std::find_if(s.routes.rbegin(), s.routes.rend(),
                        [&](const state::route& one) { return one.to == its; });
  }
  if (last == s.routes.rend()) {
    throw invalid_argument(
        fmt::format("no allocations go to pool {}: end_allocate_to_pool needs a "
                    "begin_allocate_to_pool before it",
                    static_cast<std::uint64_t>(its)));
  }
  s.routes.erase(std::next(last).base());
  s.route_changed();
}

bool caching_allocator::live_allocations_are(pool_id its,
                                             const std::vector<void*>& expected) const {
  const auto lock = state_->enter();
  std::set<address> wanted;
  for (const void* at : expected) wanted.insert(reinterpret_cast<address>(at));
  std::size_t live = 0;
  for (arena* one : state_->pool(its).arenas) {
    const std::lock_guard held(one->guard());
    for (const segment_record* segment : one->segments) {
      for (const block* b = segment->first; b != nullptr; b = b->after) {
        if (!b->live()) continue;
        if (!wanted.contains(b->at)) return false;
        ++live;
      }
    }
  }
  return live == wanted.size();
}

// --- graph capture -----------------------------------------------------------------------------

void caching_allocator::begin_capture(pool_id its) {
  state& s = *state_;
  const auto lock = s.enter();
  pool_record& one = s.pool(its);
  if (its == pool_id{}) {
    throw invalid_argument(
        "a capture cannot allocate from the default pool, whose memory would have to stay as it is",
        "make a pool for it with create_pool()");
  }
  if (one.users == 0) {  // what a graph would replay on might serve others
    throw invalid_argument(fmt::format("pool {} was released", static_cast<std::uint64_t>(its)),
                           "keep a user of it as long as the graph is launched");
  }
  ++one.captures;
  one.captured = true;
  ++s.captures;
}

void caching_allocator::end_capture(pool_id its) {
  state& s = *state_;
  const auto lock = s.enter();
  pool_record& one = s.pool(its);
  if (one.captures == 0) {
    throw invalid_argument(
        fmt::format("no capture allocates from pool {}", static_cast<std::uint64_t>(its)),
        "call begin_capture before end_capture");
  }
  const device_scope here(*s.on, s.device);
  --one.captures;
  --s.captures;
  s.settle_captured();
}

void caching_allocator::state::settle_captured() {
  for (arena* each : all_arenas) {
    const std::lock_guard held(each->guard());
    if (!each->deferred) continue;
    each->deferred->captures_ended(events,
                                   [&](const block& freed) { return in_capture(*each, freed); });
  }
}

/// The blocks of a pool, as they were.
class pool_checkpoint {
 public:
  struct block_then {
    address at;
    std::size_t bytes;
    std::size_t requested;
    native_stream stream;
    size_class kind;
  };
  std::uint64_t made_by;  ///< the allocator's number
  pool_id of;
  std::vector<block_then> live;
};

namespace {

using block_places = std::set<std::pair<address, std::size_t>>;

/// Whether the place of a block is free, or will be once all that does not stay has been freed;
/// `at_once` tells of a block that other streams used whether it is free then.
template <class AtOnce>
bool will_be_free(const arena& from, const pool_checkpoint::block_then& then,
                  const block_places& stay, AtOnce&& at_once) {
  address free_up_to = then.at;
  for (const block* b = from.covering(then.at); b != nullptr && free_up_to < then.at + then.bytes;
       b = b->after) {
    const bool goes =
        (b->use == block_use::allocated || (b->use == block_use::lent && at_once(*b))) &&
        !stay.contains({b->at, b->bytes});
    if (!goes && b->use != block_use::recent && b->use != block_use::free) return false;
    free_up_to = b->at + b->bytes;
  }
  return free_up_to >= then.at + then.bytes;
}

}  // namespace

std::shared_ptr<const pool_checkpoint> caching_allocator::checkpoint(pool_id its) {
  const auto lock = state_->enter();
  auto made = std::make_shared<pool_checkpoint>();
  made->made_by = state_->id;
  made->of = its;
  for (arena* one : state_->pool(its).arenas) {
    const std::lock_guard held(one->guard());
    for (const segment_record* segment : one->segments) {
      for (const block* b = segment->first; b != nullptr; b = b->after) {
        if (!b->live()) continue;
        made->live.push_back({b->at, b->bytes, b->requested, one->stream(), one->kind()});
      }
    }
  }
  return made;
}

caching_allocator::checkpoint_delta caching_allocator::restore(pool_id its,
                                                               const pool_checkpoint& to) {
  state& s = *state_;
  const auto lock = s.enter();
  pool_record& one = s.pool(its);
  if (to.made_by != s.id) {
    throw invalid_argument("the checkpoint is of another allocator",
                           "restore it in the allocator that made it");
  }
  if (to.of != its) {
    throw invalid_argument(fmt::format("the checkpoint is of pool {}, not of pool {}",
                                       static_cast<std::uint64_t>(to.of),
                                       static_cast<std::uint64_t>(its)));
  }
  block_places wanted;
  for (const auto& then : to.live) wanted.insert({then.at, then.bytes});
  checkpoint_delta delta;
  block_places kept;
  std::vector<address> gone;
  for (arena* each : one.arenas) {
    const std::lock_guard held(each->guard());
    for (const segment_record* segment : each->segments) {
      for (const block* b = segment->first; b != nullptr; b = b->after) {
        if (b->use == block_use::pending) {
          throw invalid_argument(
              fmt::format("pool {} has blocks that wait for other streams; its state cannot be "
                          "restored before they are free",
                          static_cast<std::uint64_t>(its)));
        }
        if (!b->live()) continue;
        if (wanted.contains({b->at, b->bytes})) {
          kept.insert({b->at, b->bytes});
        } else {
          gone.push_back(b->at);
        }
      }
    }
  }
  const auto arena_of = [&](const pool_checkpoint::block_then& then) {
    const auto found = s.arenas.find({its, then.stream, then.kind});
    return found == s.arenas.end() ? nullptr : found->second.get();
  };
  const auto refuse = [&](const pool_checkpoint::block_then& then) {
    throw invalid_argument(
        fmt::format("cannot restore pool {}: its memory at {} ({}) is no longer free",
                    static_cast<std::uint64_t>(its), format_address(then.at),
                    format_bytes(then.bytes)),
        "restore a checkpoint before the pool's memory is given back");
  };
  const device_scope here(*s.on, s.device);
  const auto at_once = [&](const block& lent) {  // as free() does
    return s.options.now().reuse == cross_stream_reuse::by_wait && !s.in_capture(*lent.owner, lent);
  };
  for (const auto& then : to.live) {
    if (kept.contains({then.at, then.bytes})) continue;
    const arena* const from = arena_of(then);
    if (from == nullptr) refuse(then);
    const std::lock_guard held(from->guard());
    if (!will_be_free(*from, then, wanted, at_once)) refuse(then);
  }
  for (const address at : gone) {
    s.free(at);
    delta.freed.push_back(reinterpret_cast<void*>(at));
  }
  for (const auto& then : to.live) {
    if (kept.contains({then.at, then.bytes})) continue;
    arena& from = *arena_of(then);
    std::unique_lock held(from.guard());
    block* const made = from.take_exactly(then.at, then.bytes);
    if (made == nullptr) refuse(then);  // another thread was faster
    s.hand_out(from, *made, then.requested, held);
    delta.allocated.push_back(reinterpret_cast<void*>(then.at));
  }
  return delta;
}

}  // namespace evmm
