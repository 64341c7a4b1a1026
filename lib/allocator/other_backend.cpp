// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/other_backend.hpp"

#include "lib/allocator/event_pool.hpp"
#include "lib/memory/copier.hpp"
#include "lib/memory/device_scope.hpp"
#include "lib/memory/region_rules.hpp"
#include "lib/memory/segment_plan.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <span>
#include <utility>
#include <vector>

namespace evmm {

namespace {

struct allocation {
  std::size_t bytes = 0;
  std::size_t requested = 0;
  native_stream stream = nullptr;
  std::vector<native_stream> other_streams = {};
  std::unique_ptr<scratch_mapping> mapped = {};  ///< without caching
};

/// The table of live allocations and the statistics, which both backends keep alike.
class table_backend : public other_backend {
 public:
  table_backend(std::shared_ptr<driver> on, device_id device)
      : on_(std::move(on)), device_(device), events_(on_, device) {}

  void record_stream(void* at, native_stream stream) override {
    const std::lock_guard lock(guard_);
    const auto found = live_.find(reinterpret_cast<address>(at));
    if (found == live_.end() || found->second.stream == stream) return;
    auto& streams = found->second.other_streams;
    if (std::find(streams.begin(), streams.end(), stream) == streams.end()) {
      streams.push_back(stream);
    }
  }
  bool owns(const void* at) const noexcept override {
    const std::lock_guard lock(guard_);
    return live_.contains(reinterpret_cast<address>(at));
  }
  allocation_place place(const void* at) const override {
    const std::lock_guard lock(guard_);
    const auto& [base, found] = *live(reinterpret_cast<address>(at), "look up");
    return {.base = reinterpret_cast<void*>(base),
            .bytes = found.bytes,
            .offset = 0,
            .block_bytes = found.bytes};
  }
  void fill(allocator_statistics& into) const override {
    const std::lock_guard lock(guard_);
    const auto put = [](pool_statistic& to, const statistic& from) {
      to.all = to.large_pool = from;
    };
    put(into.allocation, count_);
    put(into.active, count_);
    put(into.allocated_bytes, bytes_);
    put(into.active_bytes, bytes_);
    put(into.requested_bytes, requested_);
    into.num_device_alloc = count_.allocated;
    into.num_device_free = count_.freed;
  }
  void reset_peaks() override {
    const std::lock_guard lock(guard_);
    for (statistic* one : {&count_, &bytes_, &requested_}) one->reset_peak();
  }
  void reset_totals() override {
    const std::lock_guard lock(guard_);
    for (statistic* one : {&count_, &bytes_, &requested_}) one->reset_totals();
  }

 protected:
  void warn_of_live() const {
    if (live_.empty()) return;
    log().warn(
        "an allocator of DEVICE {} is destroyed with {} live allocations; their memory goes too",
        device_.value, live_.size());
  }
  /// An event or a wait there would become a part of the capture, or end it.
  void check_no_capture(native_stream owner, const std::vector<native_stream>& others) const {
    const auto captured = [&](native_stream stream) {
      return on_->capture(stream).status != capture_status::none;
    };
    if (!captured(owner) && std::none_of(others.begin(), others.end(), captured)) return;
    throw unsupported("cannot free memory while a stream that uses it is being captured",
                      "free it after the capture has ended, or use backend:native");
  }
  /// What `others` do so far comes before what `owner` does next.
  void order(native_stream owner, const std::vector<native_stream>& others) {
    check_no_capture(owner, others);
    for (native_stream stream : others) {
      const auto used = events_.record(stream);
      on_->wait(owner, used.get());
    }
  }
  void wait_for(native_stream owner, const std::vector<native_stream>& others) {
    check_no_capture(owner, others);
    on_->synchronize(owner);
    for (native_stream stream : others) on_->synchronize(stream);
  }
  /// Bytes that are not live yet but count already, so that threads cannot pass a limit together.
  class promise {
   public:
    promise(table_backend& of, std::size_t bytes, std::size_t limit) : of_(of), bytes_(bytes) {
      const std::lock_guard lock(of.guard_);
      const std::size_t counted = static_cast<std::size_t>(of.bytes_.current) + of.promised_;
      if (counted + bytes > limit) {
        throw out_of_memory(
            fmt::format("cannot allocate {} on DEVICE {}: {} are allocated and the process's limit "
                        "is {}",
                        format_bytes(bytes), of.device_.value, format_bytes(counted),
                        format_bytes(limit)),
            "raise the memory fraction");
      }
      of.promised_ += bytes;
    }
    promise(const promise&) = delete;
    promise& operator=(const promise&) = delete;
    ~promise() {
      const std::lock_guard lock(of_.guard_);
      settle();
    }
    /// They are live from now on, or never; under the table's lock.
    void settle() { of_.promised_ -= std::exchange(bytes_, 0); }

   private:
    table_backend& of_;
    std::size_t bytes_;
  };
  using table = std::map<address, allocation>;

  table::const_iterator live(address at, const char* doing) const {
    const auto found = live_.find(at);
    if (found == live_.end()) {
      throw invalid_argument(
          fmt::format("cannot {} {}: it is no live allocation of this allocator (DEVICE {})", doing,
                      format_address(at), device_.value));
    }
    return found;
  }
  void* add(address at, allocation made, promise& counted) {
    const std::lock_guard lock(guard_);
    counted.settle();
    count_.add(1);
    bytes_.add(static_cast<std::int64_t>(made.bytes));
    requested_.add(static_cast<std::int64_t>(made.requested));
    live_.insert_or_assign(at, std::move(made));
    return reinterpret_cast<void*>(at);
  }
  /// The streams to get past before take().
  struct users {
    native_stream owner;
    std::vector<native_stream> others;
  };
  users users_of(address at) const {
    const std::lock_guard lock(guard_);
    const allocation& its = live(at, "free")->second;
    return {its.stream, its.other_streams};
  }
  /// What throws has taken nothing. `give_back` is called before anybody else gets the address.
  template <class GiveBack>
  allocation take(address at, GiveBack&& give_back) {
    const std::lock_guard lock(guard_);
    live(at, "free");
    give_back();
    allocation gone = std::move(live_.extract(at).mapped());
    count_.add(-1);
    bytes_.add(-static_cast<std::int64_t>(gone.bytes));
    requested_.add(-static_cast<std::int64_t>(gone.requested));
    return gone;
  }

  const std::shared_ptr<driver> on_;
  const device_id device_;
  event_pool events_;
  mutable std::mutex guard_;
  table live_;
  statistic count_, bytes_, requested_;
  std::size_t promised_ = 0;
};

class async_backend final : public table_backend {
 public:
  async_backend(std::shared_ptr<driver> on, device_id device, const allocator_options& options)
      : table_backend(std::move(on), device) {
    allocator_options native = options;
    native.backend = allocator_backend::native;
    native.per_process_memory_fraction = 1;  // is kept to
    native.pinned = {};                      // of another allocator
    if (const std::string ignored = to_string(native); !ignored.empty()) {
      log().warn("backend:cudaMallocAsync ignores the options of the native one: {}", ignored);
    }
  }
  ~async_backend() override {
    warn_of_live();
    for (const auto& one : live_) {
      log_failure("giving back an allocation", [&] {
        const device_scope here(*on_, device_);
        order(one.second.stream, one.second.other_streams);
        on_->free_async(one.first, one.second.stream);
      });
    }
  }
  void* allocate(std::size_t bytes, native_stream stream, std::size_t limit) override {
    promise counted(*this, bytes, limit);
    const device_scope here(*on_, device_);
    const address at = on_->allocate_async(device_, bytes, stream);
    return add(at, {.bytes = bytes, .requested = bytes, .stream = stream}, counted);
  }
  void free(void* pointer) override {
    const auto at = reinterpret_cast<address>(pointer);
    const users its = users_of(at);
    const device_scope here(*on_, device_);
    order(its.owner, its.others);
    static_cast<void>(take(at, [&] { on_->free_async(at, its.owner); }));
  }
  void enable_peer(device_id peer) override {
    throw unsupported(
        fmt::format("backend:cudaMallocAsync cannot let DEVICE {} touch what it allocates",
                    peer.value),
        "use backend:native");
  }
  cache_information cache_info() const override {
    const async_memory now = on_->async_usage(device_);
    const std::size_t cached = now.reserved_bytes - std::min(now.reserved_bytes, now.used_bytes);
    return {.cached_bytes = cached, .largest_block = cached};
  }
  std::size_t empty_cache() override {
    const std::size_t before = on_->async_usage(device_).reserved_bytes;
    on_->trim_async(device_, 0);
    return before - std::min(before, on_->async_usage(device_).reserved_bytes);
  }
  void fill(allocator_statistics& into) const override {
    table_backend::fill(into);
    const async_memory now = on_->async_usage(device_);
    into.reserved_bytes.all.current = static_cast<std::int64_t>(now.reserved_bytes);
    into.reserved_bytes.all.peak = static_cast<std::int64_t>(now.reserved_peak);
    into.mapped_bytes = into.reserved_bytes.all.current;
  }
};

/// Memory is created and released at each call, so that a tool sees every mistake where it happens.
class uncached_backend final : public table_backend {
 public:
  uncached_backend(std::shared_ptr<driver> on, device_id device, const allocator_options& options)
      : table_backend(std::move(on), device),
        share_(options.share),
        peers_(options.peers),
        access_(region_access(*on_, device, peers_, true)),
        granule_(on_->granularity(memory_location::on(device))) {}
  ~uncached_backend() override {
    warn_of_live();
    for (const auto& one : live_) {
      log_failure("waiting for the streams of an allocation", [&] {
        const device_scope here(*on_, device_);
        wait_for(one.second.stream, one.second.other_streams);
      });
    }
  }

  void* allocate(std::size_t bytes, native_stream stream, std::size_t limit) override {
    const std::size_t size = evmm::round_up(bytes, granule_);
    promise counted(*this, size, limit);
    const physical_memory memory(
        *on_, {.bytes = size, .where = memory_location::on(device_), .share = share_});
    const std::shared_lock unchanged(access_guard_);
    auto mapped = std::make_unique<scratch_mapping>(*on_, memory, access_);
    const address at = mapped->base();
    return add(at,
               {.bytes = size,
                .requested = bytes,
                .stream = stream,
                .other_streams = {},
                .mapped = std::move(mapped)},
               counted);
  }
  void free(void* pointer) override {
    const auto at = reinterpret_cast<address>(pointer);
    const users its = users_of(at);
    const device_scope here(*on_, device_);
    wait_for(its.owner, its.others);
    static_cast<void>(take(at, [] {}));
  }
  std::size_t empty_cache() override { return 0; }
  void enable_peer(device_id peer) override {
    const std::lock_guard changing(access_guard_);
    if (std::find(peers_.begin(), peers_.end(), peer) != peers_.end()) return;
    std::vector<device_id> peers = peers_;
    peers.push_back(peer);
    access_rule access = region_access(*on_, device_, peers, true);
    const access_grant grant{memory_location::on(peer)};
    const std::lock_guard lock(guard_);
    for (const auto& [at, one] : live_) on_->set_access(at, one.bytes, std::span(&grant, 1));
    peers_ = std::move(peers);
    access_ = std::move(access);
  }
  cache_information cache_info() const override { return {}; }
  void fill(allocator_statistics& into) const override {
    table_backend::fill(into);
    into.segment = into.allocation;
    into.reserved_bytes = into.allocated_bytes;
    into.mapped_bytes = into.allocated_bytes.all.current;
  }

 private:
  share_kind share_;
  std::shared_mutex access_guard_;  ///< held until what was mapped by `access_` is in the table
  std::vector<device_id> peers_;
  access_rule access_;
  std::size_t granule_;
};

}  // namespace

std::unique_ptr<other_backend> make_other_backend(std::shared_ptr<driver> on, device_id device,
                                                  const allocator_options& options) {
  switch (options.backend) {
    case allocator_backend::native:
      return nullptr;
    case allocator_backend::cuda_malloc_async:
      return std::make_unique<async_backend>(std::move(on), device, options);
    case allocator_backend::none:
      return std::make_unique<uncached_backend>(std::move(on), device, options);
  }
  return nullptr;
}

}  // namespace evmm
