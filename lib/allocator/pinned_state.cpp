// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pinned_state.hpp"

#include "lib/memory/one_stream.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <bit>
#include <chrono>
#include <limits>
#include <utility>

namespace evmm {

namespace {

using pinned::block;
using pinned::block_use;
using pinned::mark;
using pinned::segment;
using pinned::stream_use;

constexpr std::size_t k_too_large = std::size_t{1} << 60;
/// Requests up to here come out of the reserve segment.
constexpr std::size_t k_small = std::size_t{1} << 20;

pinned_options checked(const pinned_options& options) {
  const unsigned threads = options.register_threads;
  if (!std::has_single_bit(threads) || threads > 128) {
    throw invalid_argument(
        fmt::format("register_threads is {}: not a power of two from 1 to 128", threads));
  }
  return options;
}

std::size_t bucket_of(std::size_t bytes) {
  return bytes <= 1 ? 0 : static_cast<std::size_t>(std::bit_width(bytes - 1));
}

std::int64_t us_since(std::chrono::steady_clock::time_point begin) {
  const auto spent = std::chrono::steady_clock::now() - begin;
  return std::chrono::duration_cast<std::chrono::microseconds>(spent).count();
}

std::int64_t count(std::size_t bytes) {
  return static_cast<std::int64_t>(bytes);
}

}  // namespace

pinned_host_allocator::state::state(std::shared_ptr<driver> on, device_id device,
                                    const pinned_options& options)
    : on_(std::move(on)),
      device_(device),
      options_(checked(options)),
      memory_(on_, device, options_) {
  static_cast<void>(on_->describe(device_));
  if (options_.background_thread) asker_ = std::thread([this] { run(); });
}

pinned_host_allocator::state::~state() {
  if (asker_.joinable()) {
    {
      const std::lock_guard lock(mutex_);
      stop_ = true;
    }
    wake_.notify_all();
    asker_.join();
  }
  log_failure("waiting for the streams of pinned memory", [&] { wait_for_streams(); });
  if (const auto left = counts_.active_requests.current; left != 0) {
    log().warn(
        "a pinned host allocator goes with {} allocations of {} alive or in use by a capture", left,
        format_bytes(static_cast<std::size_t>(counts_.active_bytes.current)));
  }
  log_failure("gathering events", [&] {
    for (marks_.heads(heads_); !heads_.empty(); marks_.heads(heads_)) {
      for (const auto& head : heads_) static_cast<void>(marks_.pop(head.stream));
    }
  });
  while (const auto piece = blocks_.remove_any()) {
    insist("giving pinned memory back", [&] { memory_.give_back(*piece); });
  }
  std::vector<native_event> events;
  log_failure("gathering events", [&] { marks_.drain(events); });
  for (const auto event : events) {
    insist("destroying an event", [&] { on_->destroy_event(event); });
  }
}

// --- allocating
// -----------------------------------------------------------------------------------

std::size_t pinned_host_allocator::state::rounded(std::size_t bytes, bool in_reserve) const {
  const std::size_t unit = in_reserve ? pinned::k_small_unit : pinned::k_unit;
  const std::size_t whole = (bytes + unit - 1) / unit * unit;
  return bytes <= options_.max_round_threshold ? std::bit_ceil(whole) : whole;
}

void* pinned_host_allocator::state::allocate(std::size_t bytes) {
  process_.check();
  if (bytes == 0) return nullptr;
  if (bytes >= k_too_large) {
    throw invalid_argument(fmt::format("cannot pin {} bytes: 1 EiB and more is an error", bytes));
  }
  if (!options_.background_thread) poll();
  block* found = from_reserve(bytes);
  const std::size_t whole = rounded(bytes, false);
  if (found == nullptr) found = from_cache(whole, bytes, false);
  if (found == nullptr && options_.background_thread) {
    poll();  // before memory is made, which takes far longer
    found = from_cache(whole, bytes, false);
  }
  if (found == nullptr) {
    try {
      found = from_driver(whole, bytes);
    } catch (const out_of_memory& failure) {
      found = when_full(whole, bytes, failure);
    }
  }
  return reinterpret_cast<void*>(found->at);
}

block* pinned_host_allocator::state::from_cache(std::size_t bytes, std::size_t requested,
                                                bool any) {
  const std::lock_guard lock(mutex_);
  block* const found = blocks_.take(bytes, any);
  if (found == nullptr) return nullptr;
  found->requested = requested;
  count_live(*found);
  return found;
}

block* pinned_host_allocator::state::from_reserve(std::size_t requested) {
  if (options_.reserve_segment == 0 || requested > k_small) return nullptr;
  if (!reserve_tried_.load()) {
    const std::lock_guard once(reserving_);
    if (!reserve_tried_.load()) {
      try {
        const std::size_t unit = pinned::k_unit;
        static_cast<void>(take((options_.reserve_segment + unit - 1) / unit * unit, true));
      } catch (const error& failure) {
        log().warn("pinned memory goes without its reserve segment of {}: {}",
                   format_bytes(options_.reserve_segment), failure.what());
      }
      reserve_tried_.store(true);
    }
  }
  const std::lock_guard lock(mutex_);
  block* const found = blocks_.take_reserved(rounded(requested, true));
  if (found == nullptr) return nullptr;
  found->requested = requested;
  count_live(*found);
  return found;
}

block* pinned_host_allocator::state::from_driver(std::size_t bytes, std::size_t requested) {
  return take(bytes, false, requested);
}

block* pinned_host_allocator::state::take(std::size_t bytes, bool reserve, std::size_t requested) {
  make_context();
  const auto begin = std::chrono::steady_clock::now();
  segment piece = memory_.take(bytes);
  const std::int64_t us = us_since(begin);
  piece.reserve = reserve;
  block* made = nullptr;
  try {
    const std::lock_guard lock(mutex_);
    made = blocks_.add(piece);
    auto& bucket = counts_.buckets[bucket_of(bytes)];
    counts_.allocations.add(1);
    counts_.allocated_bytes.add(count(bytes));
    bucket.allocations.add(1);
    counts_.host_alloc.add(us);
    bucket.host_alloc.add(us);
    if (reserve) {
      made = &blocks_.give(*made);
    } else {
      made->requested = requested;
      count_live(*made);
    }
  } catch (...) {
    insist("giving pinned memory back", [&] { memory_.give_back(piece); });
    throw;
  }
  return made;
}

/// Page-locking takes any context and makes one on device 0 where there is none; an event sees to
/// it that ours is there.
void pinned_host_allocator::state::make_context() {
  if (has_context_.load()) return;
  const native_event event = on_->create_event(device_);
  try {
    const std::lock_guard lock(mutex_);
    marks_.made(device_);
    marks_.spare(device_, event);
  } catch (...) {
    insist("destroying an event", [&] { on_->destroy_event(event); });
    throw;
  }
  has_context_.store(true);
}

block* pinned_host_allocator::state::when_full(std::size_t bytes, std::size_t requested,
                                               const out_of_memory& failure) {
  const auto quiet = [] {};
  // Once for what is free now, once more for what streams give free.
  for (const bool wait : {false, true}) {
    if (wait) {
      if (waiting_.load() == 0) break;
      wait_for_streams();
      if (block* const found = from_cache(bytes, requested, false)) return found;
    }
    if (give_back(0, quiet) > 0) {
      {
        const std::lock_guard lock(mutex_);
        ++counts_.num_retries;
      }
      try {
        return from_driver(bytes, requested);
      } catch (const out_of_memory&) {  // what was said first is what is reported
      }
    }
    if (block* const found = from_cache(bytes, requested, true)) return found;
  }
  throw_out_of_memory(bytes, requested, failure);
}

void pinned_host_allocator::state::throw_out_of_memory(std::size_t bytes, std::size_t requested,
                                                       const out_of_memory& failure) {
  const std::lock_guard lock(mutex_);
  ++counts_.num_ooms;
  const auto text = [](std::int64_t amount) {
    return format_bytes(static_cast<std::size_t>(amount));
  };
  std::string help = failure.help();
  if (bytes / 8 * 7 > requested) {
    help = fmt::format("lower pinned_max_round_threshold_mb, which made it {}; {}",
                       format_bytes(bytes), help);
  } else if (!options_.max_cached_size && blocks_.free_bytes() > 0) {
    help =
        "free allocations that share segments with cached memory, or set "
        "pinned_max_cached_size_mb so that large blocks are not kept; " +
        help;
  }
  throw out_of_memory(
      fmt::format("cannot pin {} ({} rounded up) for DEVICE {}: this allocator holds {} in {} "
                  "pieces, of which {} are live or in use by streams and {} free; {}",
                  format_bytes(requested), format_bytes(bytes), device_.value,
                  text(counts_.allocated_bytes.current), counts_.allocations.current,
                  text(counts_.active_bytes.current), format_bytes(blocks_.free_bytes()),
                  failure.message()),
      std::move(help), failure.native_code());
}

void pinned_host_allocator::state::count_live(const block& which) {
  auto& bucket = counts_.buckets[bucket_of(which.bytes)];
  counts_.active_requests.add(1);
  counts_.active_bytes.add(count(which.bytes));
  bucket.active_requests.add(1);
  counts_.requested_bytes.add(count(which.requested));
}

void pinned_host_allocator::state::count_free(const block& which) {
  auto& bucket = counts_.buckets[bucket_of(which.bytes)];
  counts_.active_requests.add(-1);
  counts_.active_bytes.add(-count(which.bytes));
  bucket.active_requests.add(-1);
}

// --- freeing
// --------------------------------------------------------------------------------------

bool pinned_host_allocator::state::record(const void* at, native_stream stream, device_id of) {
  process_.check();
  require_one_stream(stream);
  // Else free() would find it, and could not free.
  if (of.value < 0 || of.value >= on_->device_count()) static_cast<void>(on_->describe(of));
  const std::lock_guard lock(mutex_);
  block* const found = blocks_.find(reinterpret_cast<address>(at));
  if (found == nullptr || found->use != block_use::live) return false;
  const stream_use added{of, stream};
  for (const auto& known : found->streams) {
    if (known == added) return true;
  }
  found->streams.push_back(added);
  return true;
}

void pinned_host_allocator::state::free(void* pointer) {
  process_.check();
  if (pointer == nullptr) return;
  const auto at = reinterpret_cast<address>(pointer);
  block* leaving = nullptr;
  bool oversize = false;
  std::vector<stream_use> streams;
  {
    const std::lock_guard lock(mutex_);
    block* const found = blocks_.find(at);
    if (found == nullptr || found->at != at || found->use != block_use::live) {
      throw invalid_argument(
          fmt::format("cannot free {}: it is no live allocation of this pinned host allocator",
                      format_address(at)),
          "pass what allocate() gave, once");
    }
    streams = found->streams;
    found->use = block_use::leaving;
    leaving = found;
  }
  // Nobody else touches a block that is leaving: events are recorded without the lock.
  std::vector<mark> marks;
  const auto undo = [&] {
    for (std::size_t i = 0; i < marks.size(); ++i) {
      if (marks[i].event != nullptr) return_event(streams[i].first, marks[i].event);
    }
    const std::lock_guard lock(mutex_);
    leaving->use = block_use::live;
  };
  try {
    marks.reserve(streams.size());
    for (const auto& stream : streams) marks.push_back({leaving, record_event(stream)});
    const std::lock_guard lock(mutex_);
    marks_.add(streams, marks);
    waiting_.store(marks_.waiting());
    counts_.requested_bytes.add(-count(leaving->requested));
    if (streams.empty()) {
      count_free(*leaving);
      oversize = is_oversize(blocks_.give(*leaving));
    } else {
      leaving->use = block_use::waiting;
      leaving->marks = marks.size();
    }
  } catch (...) {
    undo();
    throw;
  }
  if (oversize) {
    give_back_oversize();
  } else if (!streams.empty() && options_.background_thread) {
    wake_.notify_all();
  }
}

// --- giving back
// ----------------------------------------------------------------------------------

std::size_t pinned_host_allocator::state::empty_cache() {
  process_.check();
  poll();
  std::exception_ptr first;
  const std::size_t given = give_back(0, [&] {
    if (!first) first = std::current_exception();
  });
  if (first && !options_.free_catch_all) std::rethrow_exception(first);
  return given;
}

std::size_t pinned_host_allocator::state::give_back(std::size_t above,
                                                    const std::function<void()>& failed) {
  std::size_t given = 0;
  address next = 0;
  for (;;) {
    std::optional<pinned::block_table::taken> out;
    {
      const std::lock_guard lock(mutex_);
      out = blocks_.take_out(next, above);
    }
    if (!out) return given;
    const segment piece = out->what();
    next = piece.base + 1;
    const auto begin = std::chrono::steady_clock::now();
    try {
      memory_.give_back(piece);
    } catch (const std::exception& failure) {
      log().error("giving {} of pinned memory back: {}", format_bytes(piece.bytes), failure.what());
      {
        const std::lock_guard lock(mutex_);
        blocks_.put_back(std::move(*out));
      }
      failed();
      continue;
    }
    const std::int64_t us = us_since(begin);
    given += piece.bytes;
    const std::lock_guard lock(mutex_);
    auto& bucket = counts_.buckets[bucket_of(piece.bytes)];
    counts_.allocations.add(-1);
    counts_.allocated_bytes.add(-count(piece.bytes));
    bucket.allocations.add(-1);
    counts_.host_free.add(us);
    bucket.host_free.add(us);
  }
}

bool pinned_host_allocator::state::is_oversize(const block& which) const {
  return options_.max_cached_size && which.bytes > *options_.max_cached_size && which.whole() &&
         !which.in->reserve;
}

void pinned_host_allocator::state::give_back_oversize() noexcept {
  log_failure("giving pinned memory back", [&] { give_back(*options_.max_cached_size, [] {}); });
}

}  // namespace evmm
