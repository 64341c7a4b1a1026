// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/options.hpp>
#include <evmm/allocator/statistics.hpp>
#include <evmm/driver.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>

namespace [[gnu::visibility("default")]] evmm {

/// How often something was done, and how long it took.
struct call_times {
  std::int64_t count = 0;
  std::int64_t total_us = 0;
  std::int64_t min_us = 0;  ///< 0 when count is
  std::int64_t max_us = 0;

  double average_us() const noexcept {
    return count == 0 ? 0 : static_cast<double>(total_us) / static_cast<double>(count);
  }
  void add(std::int64_t us) noexcept {
    min_us = count == 0 || us < min_us ? us : min_us;
    max_us = us > max_us ? us : max_us;
    total_us += us;
    ++count;
  }
  friend bool operator==(const call_times&, const call_times&) = default;
};

/// What was asked for between two powers of two.
struct pinned_bucket {
  statistic active_requests;  ///< as in pinned_statistics
  statistic allocations;
  call_times host_alloc, host_free;
};

/// PyTorch's names and meanings (torch.cuda.host_memory_stats).
struct pinned_statistics {
  statistic active_requests;  ///< blocks that are live or wait for streams
  statistic active_bytes;
  statistic allocations;         ///< pieces of memory held from the driver, whatever is in them
  statistic allocated_bytes;     ///< of those
  call_times host_alloc;         ///< memory taken: cuMemHostAlloc, or made and registered
  call_times host_free;          ///< memory given back
  statistic requested_bytes;     ///< what callers asked for, before rounding; of live blocks
  std::int64_t num_retries = 0;  ///< requests that needed cached memory to be given back
  std::int64_t num_ooms = 0;     ///< requests that failed
  /// Bucket n counts sizes above 2^(n-1) and up to 2^n bytes.
  std::array<pinned_bucket, 64> buckets = {};
};

/// Page-locked host memory that is kept for reuse: PyTorch's CachingHostAllocator, without its
/// powers of two.
///
/// Addresses: a live allocation stays where it is. Multiples of 4,096; of 512 for those out of the
///   reserve segment. CPU and every device reach it at the same address.
/// Units: bytes. A request takes its size rounded up to 4,096 (512 in the reserve segment), or to a
///   power of two up to pinned_options::max_round_threshold. A free block serves requests down to a
///   quarter of it, and any when it is of 1 MiB or less; what is over stays free, and joins its
///   neighbours when they are free. When memory has run out, any free block serves that is large
///   enough.
/// Threads: every member from any thread. Memory is made and given back, and events are asked, with
///   no lock that other calls need. With pinned_options::background_thread a thread of its own
///   asks.
/// Streams: a stream's use is told by record(); after free() the block is not handed out before
///   that stream is past what was enqueued when free() was called. Nothing synchronises, unless
///   memory has run out. CUDA's per-thread default stream, one name for many streams, is
///   unsupported.
/// Errors: out_of_memory says what was asked, what is held, and which option helps; the allocator
///   stays usable. A call that throws has changed nothing. Calls in a forked child are an
///   invalid_argument.
class pinned_host_allocator {
 public:
  /// Nothing is taken before the first request. `device` decides the NUMA node by the options'
  /// placement, and is where streams are unless record() says otherwise. Throws invalid_argument
  /// for a device that does not exist and for register_threads that is no power of two up to 128.
  pinned_host_allocator(std::shared_ptr<driver> on, device_id device,
                        const pinned_options& options = {});
  /// Waits for the streams of freed blocks and gives everything back. Live allocations die with it,
  /// with a warning.
  ~pinned_host_allocator();
  pinned_host_allocator(const pinned_host_allocator&) = delete;
  pinned_host_allocator& operator=(const pinned_host_allocator&) = delete;

  /// Null for 0 bytes. What is in the memory is not said. Throws invalid_argument at 1 EiB and
  /// above, out_of_memory.
  [[nodiscard]] void* allocate(std::size_t bytes);
  /// Null is ignored. Records an event on each stream that was told; those streams must exist. A
  /// stream that is being captured counts as busy until its capture has ended: the memory of a
  /// graph must be kept by whoever keeps the graph. Memory above max_cached_size goes back when all
  /// streams are past it; should the driver refuse, that is logged and it stays cached. Throws
  /// invalid_argument naming a pointer that is not a live allocation, and what recording throws.
  void free(void* at);
  /// A stream of `device` (the allocator's own unless named) uses the allocation that holds `at`.
  /// False, without an effect, for memory that is not a live allocation of this allocator. Throws
  /// invalid_argument for a device that does not exist.
  bool record(const void* at, native_stream stream, std::optional<device_id> device = {});
  /// Whether `at` is in a live allocation.
  bool owns(const void* at) const;

  /// Looks which streams are past their uses, and gives back all memory that nobody uses, but for
  /// the reserve segment. Does not wait. Returns the bytes given back. Throws what giving back
  /// throws, unless options().free_catch_all; what could not be given back stays cached.
  std::size_t empty_cache();
  /// Looks which streams are past their uses; allocate() does so by itself.
  void poll();

  pinned_statistics statistics() const;
  /// Peaks become what is current.
  void reset_peaks();
  /// Sums, counts and times start anew.
  void reset_totals();

  const pinned_options& options() const noexcept;
  device_id device() const noexcept;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm
