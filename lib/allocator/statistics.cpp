// SPDX-License-Identifier: Apache-2.0
// What an allocator tells about itself, and the settings that may change.
#include "lib/allocator/allocator_state.hpp"
#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <utility>

namespace evmm {

namespace {

/// PyTorch counts free blocks beside others in segments of one handle.
void count_inactive_splits(const std::vector<arena*>& arenas, pool_statistic& count,
                           pool_statistic& bytes) {
  std::int64_t found[2] = {0, 0};
  std::int64_t found_bytes[2] = {0, 0};
  for (arena* one : arenas) {
    const std::lock_guard held(one->guard());
    one->merge_recent();
    const auto kind = static_cast<std::size_t>(one->kind());
    one->for_each_free(0, [&](const block* free) {
      if (free->in->expandable() || (free->before == nullptr && free->after == nullptr)) return;
      ++found[kind];
      found_bytes[kind] += static_cast<std::int64_t>(free->bytes);
    });
  }
  const auto change = [](pool_statistic& of, const std::int64_t(&now)[2]) {
    of.all.add(now[0] + now[1] - of.all.current);
    of.small_pool.add(now[0] - of.small_pool.current);
    of.large_pool.add(now[1] - of.large_pool.current);
  };
  change(count, found);
  change(bytes, found_bytes);
}

/// PyTorch's table: the divisions for sizes from 1 MiB to 32 GiB, by powers of two.
std::string divisions_text(const allocator_options& options) {
  std::string text;
  for (int power = 0; power < 16; ++power) {
    unsigned divisions = 0;
    for (const rounding_step& step : options.roundup_power2_divisions) {
      if (step.from <= std::size_t{1} << (20 + power)) divisions = step.divisions;
    }
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", 1 << power, divisions);
  }
  return "[" + text + "]";
}

}  // namespace

void caching_allocator::state::count_inactive_splits() {
  evmm::count_inactive_splits(all_arenas, inactive_split, inactive_split_bytes);
}

allocator_statistics caching_allocator::statistics() const {
  state& s = *state_;
  const auto lock = s.enter();
  allocator_statistics all;
  if (s.other) {
    s.other->fill(all);
    all.num_ooms = s.ooms;
    return all;
  }
  s.books.fill(all);
  s.supply.fill(all);
  for (const auto& [its, one] : s.pools) {
    if (its != pool_id{}) all.reserved_bytes_by_private_pools.emplace(its, one->reserved_bytes);
  }
  s.count_inactive_splits();
  all.inactive_split = s.inactive_split;
  all.inactive_split_bytes = s.inactive_split_bytes;
  all.num_alloc_retries = s.retries;
  all.num_ooms = s.ooms;
  all.num_oom_rejections = s.rejections;
  all.num_sync_all_streams = s.full_waits;
  const auto& split = s.options.now().max_split_size;
  all.max_split_size = split ? static_cast<std::int64_t>(*split) : -1;
  const std::lock_guard oversize(s.oversize_guard);
  all.oversize_allocations = s.oversize_allocations;
  return all;
}

allocator_statistics caching_allocator::statistics(pool_id its) const {
  state& s = *state_;
  const auto lock = s.enter();
  const pool_record& one = s.pool(its);
  allocator_statistics all;
  count_inactive_splits(one.arenas, all.inactive_split, all.inactive_split_bytes);
  all.reserved_bytes = one.reserved_bytes;
  for (arena* each : one.arenas) {
    const std::lock_guard held(each->guard());
    const bool small = each->kind() == size_class::small;
    const auto add = [small](pool_statistic& to, std::int64_t amount) {
      to.all.add(amount);
      (small ? to.small_pool : to.large_pool).add(amount);
    };
    for (const segment_record* segment : each->segments) {
      bool backed = false;
      for (const block* b = segment->first; b != nullptr; b = b->after) {
        if (b->use == block_use::hole) continue;
        const auto bytes = static_cast<std::int64_t>(b->bytes);
        backed = true;
        const bool live = b->live();
        if (live || b->use == block_use::pending) {
          add(all.active, 1);
          add(all.active_bytes, bytes);
        }
        if (!live) continue;
        add(all.allocation, 1);
        add(all.allocated_bytes, bytes);
        add(all.requested_bytes, static_cast<std::int64_t>(b->requested));
      }
      if (!backed) continue;
      add(all.segment, segment->expandable() ? segment->range->backed_handles() : 1);
    }
  }
  return all;
}

void caching_allocator::reset_peaks() {
  state& s = *state_;
  const auto lock = s.enter();
  if (s.other) return s.other->reset_peaks();
  s.books.reset_peaks();
  s.supply.reset_peaks();
  for (const auto& [its, one] : s.pools) one->reserved_bytes.reset_peaks();
  s.count_inactive_splits();
  s.inactive_split.reset_peaks();
  s.inactive_split_bytes.reset_peaks();
  const std::lock_guard oversize(s.oversize_guard);
  s.oversize_allocations.reset_peak();
}

void caching_allocator::reset_totals() {
  state& s = *state_;
  const auto lock = s.enter();
  if (s.other) {
    s.ooms = 0;
    return s.other->reset_totals();
  }
  s.books.reset_totals();
  s.supply.reset_totals();
  for (const auto& [its, one] : s.pools) one->reserved_bytes.reset_totals();
  s.count_inactive_splits();
  s.inactive_split.reset_totals();
  s.inactive_split_bytes.reset_totals();
  s.retries = s.ooms = s.rejections = s.full_waits = 0;
  const std::lock_guard oversize(s.oversize_guard);
  s.oversize_allocations.reset_totals();
}

cache_information caching_allocator::cache_info() const {
  state& s = *state_;
  if (s.other) return s.other->cache_info();
  const auto lock = s.enter();
  cache_information found;
  for (arena* one : s.all_arenas) {
    const std::lock_guard held(one->guard());
    one->merge_recent();
    one->for_each_free(0, [&](const block* b) {
      found.cached_bytes += b->bytes;
      found.largest_block = std::max(found.largest_block, b->bytes);
    });
  }
  return found;
}

memory_report caching_allocator::report() const {
  const allocator_statistics now = statistics();
  const memory_usage usage = state_->on->usage(memory_location::on(state_->device));
  const auto bytes = [](const pool_statistic& of) {
    return static_cast<std::size_t>(of.all.current);
  };
  const auto host = static_cast<std::size_t>(now.host_tier_bytes);
  const std::size_t reserved = bytes(now.reserved_bytes) - host;
  const std::size_t used = usage.total_bytes - usage.free_bytes;
  return {.total_bytes = usage.total_bytes,
          .free_bytes = usage.free_bytes,
          .allocated_bytes = bytes(now.allocated_bytes),
          .active_bytes = bytes(now.active_bytes),
          .requested_bytes = bytes(now.requested_bytes),
          .reserved_bytes = reserved,
          .mapped_bytes = static_cast<std::size_t>(now.mapped_bytes),
          .host_tier_bytes = host,
          .outside_bytes = used - std::min(used, reserved)};
}

std::string memory_report::text() const {
  return fmt::format(
      "device: {} of {} free, {} in use outside this allocator\n"
      "held: {} on the device, {} in host memory, {} mapped\n"
      "live: {} allocated ({} asked for), {} active",
      format_bytes(free_bytes), format_bytes(total_bytes), format_bytes(outside_bytes),
      format_bytes(reserved_bytes), format_bytes(host_tier_bytes), format_bytes(mapped_bytes),
      format_bytes(allocated_bytes), format_bytes(requested_bytes), format_bytes(active_bytes));
}

std::size_t caching_allocator::empty_cache(std::optional<pool_id> pool) {
  state& s = *state_;
  const device_scope here(*s.on, s.device);
  if (s.other) return s.other->empty_cache();
  const auto lock = s.enter();
  const pool_record* const only = pool ? &s.pool(*pool) : nullptr;
  s.settle_captured();
  for (arena* one : s.all_arenas) {
    if (only != nullptr && &one->pool() != only) continue;
    while (s.captures == 0 && s.wait_for_event(*one, false)) {
    }
  }
  if (s.captures == 0) ++s.full_waits;
  const std::size_t given = s.give_back(static_cast<std::size_t>(-1), {}, only);
  for (arena* one : s.all_arenas) {
    if ((only != nullptr && &one->pool() != only) || !one->pool().may_give()) continue;
    const std::lock_guard held(one->guard());
    s.supply.drop_unused_ranges(*one);
  }
  std::vector<pool_record*> unused;
  for (const auto& [its, one] : s.pools) {
    if (one->users == 0) unused.push_back(one.get());
  }
  for (pool_record* one : unused) s.drop_if_unused(*one);
  return given;
}

// --- settings ----------------------------------------------------------------------------------

void caching_allocator::set_memory_fraction(double fraction) {
  if (!(fraction >= 0 && fraction <= 1)) {
    throw invalid_argument(fmt::format("the memory fraction is {}, not in [0, 1]", fraction));
  }
  const auto lock = state_->enter();
  allocator_options next = state_->options.now();
  next.per_process_memory_fraction = fraction;
  state_->options.set(next);
}

double caching_allocator::memory_fraction() const {
  return state_->options.now().per_process_memory_fraction;
}

allocator_options caching_allocator::options() const {
  return state_->options.now();
}

void caching_allocator::configure(std::string_view text) {
  const auto lock = state_->enter();
  const allocator_options& now = state_->options.now();
  const allocator_options next = parse_options(text, now);
  if (next.backend != now.backend) {
    throw invalid_argument("the backend of an allocator cannot change",
                           "set it before the allocator is made");
  }
  if (next.min_block != now.min_block || next.small_limit != now.small_limit) {
    throw invalid_argument("min_block_size and small_limit_kb of an allocator cannot change",
                           "set them before the allocator is made");
  }
  if (next.host != now.host || next.share != now.share) {
    throw invalid_argument("host_placement and share of an allocator cannot change",
                           "set them before the allocator is made");
  }
  for (const device_id peer : now.peers) {
    if (std::find(next.peers.begin(), next.peers.end(), peer) == next.peers.end()) {
      throw invalid_argument(fmt::format("device {} cannot lose its access", peer.value),
                             "name all peers that were named before, and more");
    }
  }
  for (const device_id peer : next.peers) {
    const bool known = std::find(now.peers.begin(), now.peers.end(), peer) != now.peers.end();
    if (!known) enable_peer(peer);
  }
  state_->options.set(next);
}

std::vector<expandable_size> caching_allocator::expandable_sizes() const {
  const auto lock = state_->enter();
  return state_->supply.sizes();
}

void caching_allocator::set_stream_class(native_stream stream, const std::string& name) {
  const auto lock = state_->enter();
  state_->stream_classes[stream] = name;
}

// --- history -----------------------------------------------------------------------------------

void caching_allocator::record_history(const history_options& options) {
  state_->process.check();
  state_->happened.configure(options);
}

void caching_allocator::annotate(std::vector<std::pair<std::string, std::string>> values) {
  state_->process.check();
  state_->happened.annotate(std::move(values));
}

void caching_allocator::push_compile_context(std::string text) {
  thread_notes::mine().compile_contexts.push_back(
      std::make_shared<const std::string>(std::move(text)));
}

void caching_allocator::pop_compile_context() {
  auto& contexts = thread_notes::mine().compile_contexts;
  if (contexts.empty()) throw invalid_argument("there is no compile context to pop");
  contexts.pop_back();
}

void caching_allocator::set_user_metadata(std::string text) {
  thread_notes::mine().user_metadata =
      text.empty() ? nullptr : std::make_shared<const std::string>(std::move(text));
}

allocator_snapshot caching_allocator::snapshot(std::optional<pool_id> pool, bool traces) const {
  state& s = *state_;
  const auto lock = s.enter();
  allocator_snapshot all;
  std::size_t active_bytes = 0;
  const pool_record* const only = pool ? &s.pool(*pool) : nullptr;
  for (arena* one : s.all_arenas) {
    if (only != nullptr && &one->pool() != only) continue;
    const std::lock_guard held(one->guard());
    one->merge_recent();
    for (const segment_record* segment : one->segments) {
      segment_snapshot* run = nullptr;  // of addresses with memory behind them
      for (const block* b = segment->first; b != nullptr; b = b->after) {
        if (b->use == block_use::hole) {
          run = nullptr;
          continue;
        }
        if (run == nullptr) {
          run = &all.segments.emplace_back();
          run->device = s.device.value;
          run->at = b->at;
          run->stream = one->stream();
          run->large = one->kind() == size_class::large;
          run->pool = number_of(one->pool().id);
          run->expandable = segment->expandable();
          const call_stack* stack = nullptr;
          if (segment->memory != nullptr) {
            run->where = segment->memory->where();
            stack = segment->memory->stack.get();
          } else if (const span_record* const span = segment->range->span_at(b->at)) {
            run->where = span->what.where();
            stack = span->what.stack.get();
          }
          if (stack != nullptr) run->frames = stack->resolve();
        }
        const bool live = b->live();
        const bool active = live || b->use == block_use::pending;
        run->total_bytes += b->bytes;
        if (live) run->allocated_bytes += b->bytes;
        if (active) run->active_bytes += b->bytes;
        if (active) active_bytes += b->bytes;
        if (active) run->requested_bytes += b->requested;
        run->blocks.push_back(
            {.at = b->at,
             .bytes = b->bytes,
             .requested_bytes = active ? b->requested : 0,
             .state = live     ? block_state::active_allocated
                      : active ? block_state::active_pending_free
                               : block_state::inactive,
             .frames = b->stack ? b->stack->resolve() : std::vector<stack_frame>()});
      }
    }
  }
  std::sort(all.segments.begin(), all.segments.end(),
            [](const auto& a, const auto& b) { return a.at < b.at; });
  if (s.happened.wanted()) {
    s.happened.record({.action = trace_action::snapshot,
                       .at = 0,
                       .bytes = active_bytes,
                       .stream = nullptr,
                       .pool = pool.value_or(pool_id{})});
  }
  all.device_traces.resize(static_cast<std::size_t>(s.device.value) + 1);
  if (traces) all.device_traces.back() = s.happened.entries();
  all.external_annotations = s.happened.annotations();
  const allocator_options& now = s.options.now();
  const auto text = [](bool value) { return std::string(value ? "True" : "False"); };
  all.settings = {
      {"PYTORCH_CUDA_ALLOC_CONF", to_string(now)},
      {"max_split_size",
       std::to_string(now.max_split_size ? static_cast<std::int64_t>(*now.max_split_size) : -1)},
      {"garbage_collection_threshold", fmt::format("{}", now.garbage_collection_threshold)},
      {"expandable_segments", text(now.expandable_segments)},
      {"pinned_num_register_threads", std::to_string(now.pinned.register_threads)},
      {"release_lock_on_cudamalloc", text(now.release_lock_on_device_alloc)},
      {"pinned_use_cuda_host_register", text(now.pinned.use_host_register)},
      {"graph_capture_record_stream_reuse", text(now.graph_capture_record_stream_reuse)},
      {"roundup_power2_divisions", divisions_text(now)},
  };
  return all;
}

caching_allocator::subscription caching_allocator::on_out_of_memory(
    std::function<void(const oom_report&)> observer) {
  state_->process.check();
  state::check_callable(observer, "on_out_of_memory");
  auto kept = std::make_shared<std::function<void(const oom_report&)>>(std::move(observer));
  const std::lock_guard lock(state_->observers_guard);
  state_->oom_observers.push_back(kept);
  return kept;
}

caching_allocator::subscription caching_allocator::on_trace(
    std::function<void(const trace_entry&)> observer) {
  state_->process.check();
  state::check_callable(observer, "on_trace");
  return state_->happened.listen(std::move(observer));
}

caching_allocator::subscription caching_allocator::on_shortage(std::function<bool()> callback) {
  state_->process.check();
  state::check_callable(callback, "on_shortage");
  auto kept = std::make_shared<std::function<bool()>>(std::move(callback));
  const std::lock_guard lock(state_->observers_guard);
  state_->shortage_callbacks.push_back(kept);
  return kept;
}

// --- invariants --------------------------------------------------------------------------------

void caching_allocator::check_invariants() const {
  state& s = *state_;
  const auto lock = s.enter();
  const auto require = [](bool holds, const char* what) {
    if (!holds) throw std::logic_error(what);
  };
  for (arena* one : s.all_arenas) {
    const std::lock_guard held(one->guard());
    std::size_t free_bytes = 0, runs = 0, recent = 0, live = 0;
    std::int64_t live_bytes = 0;
    for (const segment_record* segment : one->segments) {
      address next = segment->base;
      const block* last = nullptr;
      for (const block* b = segment->first; b != nullptr; last = b, b = b->after) {
        require(b->at == next, "blocks of a segment leave a gap or overlap");
        require(b->bytes > 0 && b->before == last && b->in == segment, "a block's links are wrong");
        require(one->find(b->at) == b, "a block is not in its arena's table");
        require(last == nullptr || last->use != b->use ||
                    (b->use != block_use::free && b->use != block_use::hole),
                "free neighbours were not merged");
        if (segment->expandable()) {
          const expandable_range& range = *segment->range;
          for (address at = range.round_down(b->at); at < b->at + b->bytes; at += range.granule()) {
            const span_record* const span = range.span_at(at);
            const bool backed = span != nullptr && span->home();
            require(backed == (b->use != block_use::hole) || at < b->at,
                    "a block without memory, or memory without a block");
          }
        }
        if (b->use == block_use::free) free_bytes += b->bytes;
        if (b->vacant() && (last == nullptr || !last->vacant())) {
          ++runs;
          std::size_t run_bytes = 0;
          std::size_t run_free = 0;
          for (const block* part = b; part != nullptr && part->vacant(); part = part->after) {
            run_bytes += part->bytes;
            if (part->use == block_use::free) run_free = std::max(run_free, part->bytes);
          }
          require(run_bytes == b->run_bytes, "a run of free addresses has another size");
          require(run_free == b->run_free, "the largest free block of a run has another size");
        }
        recent += b->use == block_use::recent;
        if (b->live()) {
          ++live;
          live_bytes += static_cast<std::int64_t>(b->bytes);
        }
        next += b->bytes;
      }
      require(next == segment->base + segment->bytes, "blocks do not cover their segment");
    }
    require(free_bytes == one->free_bytes(), "free blocks have other bytes");
    require(runs == one->runs().count(), "the index of runs has another count");
    require(one->runs().sound(), "the index of runs is out of order");
    require(recent == one->recent_count(), "the lists of recent blocks have another count");
    require(static_cast<std::int64_t>(live) == one->allocated_count() &&
                live_bytes == one->allocated_bytes(),
            "the statistics of an arena are wrong");
  }
}

}  // namespace evmm
