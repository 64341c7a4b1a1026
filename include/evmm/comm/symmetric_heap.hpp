// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/comm/symmetric_region.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Which tiers may hold an allocation, in order of preference.
enum class tier_policy : std::uint8_t { device_first, device_only, host_first, host_only };
const char* to_string(tier_policy policy) noexcept;

/// What an allocation wants beside its size; equal on all ranks.
struct symmetric_request {
  tier_policy tiers = tier_policy::device_first;
  /// Whether it may lie partly in each tier, where `tiers` names both. Kernels do not notice; one
  /// cudaMemcpyAsync over both crashes in libcuda 580, so copy such a buffer with driver::copy,
  /// which cuts there.
  bool may_span = false;
  /// Of the offset, in bytes: a power of two up to the region's granularity.
  std::size_t alignment = 512;
  pool_id pool{};
};

/// What a pool of a heap is made from; equal on all ranks.
struct symmetric_pool_options {
  /// Requests of the default pool may use this pool's free blocks before they fail.
  bool use_on_oom = false;
};

/// When the ranks compare what they have called.
enum class divergence_check : std::uint8_t {
  at_changes,  ///< at every collective step, and at verify()
  every_call,  ///< after every call: one small all-gather each, for debugging
};

/// What a heap is made from; `growth_step` and `check` are equal on all ranks.
struct symmetric_heap_options {
  /// Least bytes that a full heap grows by; more when it is large (an eighth of its size), so that
  /// segments stay few.
  std::size_t growth_step = std::size_t{64} << 20;
  /// Most bytes of this rank's DEVICE and HOST_NUMA segments. Ranks may differ: the least counts.
  std::size_t device_limit = static_cast<std::size_t>(-1);
  std::size_t host_limit = static_cast<std::size_t>(-1);
  divergence_check check = divergence_check::at_changes;
  /// Calls that are remembered, to name the first one that differs: 48 bytes each.
  std::size_t calls_kept = std::size_t{1} << 16;
};

/// One rank's memory in a heap_report.
struct rank_memory {
  std::size_t device_bytes = 0;  ///< of its segments
  std::size_t host_bytes = 0;
  std::size_t cached_bytes = 0;        ///< freed handles kept for reuse
  std::size_t device_total_bytes = 0;  ///< of its device
  std::size_t device_free_bytes = 0;   ///< for anybody
  std::size_t device_limit = 0;
};

/// All ranks' memory, and what the heap does with it, which is the same everywhere.
struct heap_report {
  std::size_t allocated_bytes = 0;  ///< live blocks
  std::size_t requested_bytes = 0;  ///< what callers asked for
  std::size_t free_bytes = 0;       ///< backed and free
  std::size_t largest_free_block = 0;
  std::size_t reserved_bytes = 0;  ///< addresses
  std::size_t segments = 0;
  std::vector<rank_memory> ranks;
  /// As a table for people.
  std::string text() const;
};

/// A caching allocator on a symmetric region: equal calls in equal order give equal offsets on all
/// ranks, whatever their streams do meanwhile.
///
/// Addresses: an allocation keeps its offset, and its address on each rank, while the memory behind
///   it grows, moves between tiers or is merged. peer pointers are region().peer(rank) + offset.
/// Units: bytes; blocks are multiples of 512.
/// Threads: one thread at a time, on every rank the same calls in the same order. free() and
///   record_stream() count as calls.
/// Streams: memory belongs to the stream it was allocated on. A freed block may go to another
///   stream at once: that stream waits, by an event, for those that used the block before. It is
///   never asked whether they are done, since the answer would differ between ranks. What a *peer*
///   does with this rank's part is the program's to order (symmetric_channel, NCCL, flags): it must
///   be over before this rank's stream reaches the point of free(). A stream lives at least until
///   the first trim, migrate or close() after its last use, which waits for it. So does a change
///   for all that used the heap, growth too, where it takes down an nccl_window on it. CUDA's
///   per-thread default stream, one name for many streams, is unsupported.
/// Errors: a full heap grows, which is collective: all ranks return, or all throw the same
///   out_of_memory and no heap has changed. Ranks whose calls differ throw the same
///   invalid_argument naming the first call that differs, at the next collective step.
class symmetric_heap {
 public:
  /// Takes the region over: from here on only the heap changes it. What is backed already becomes
  /// free memory of the default pool. Collective. Throws invalid_argument for options that cannot
  /// be or that differ.
  explicit symmetric_heap(symmetric_region region, const symmetric_heap_options& options = {});
  /// Local, as the region's. Warns about what is live.
  ~symmetric_heap();
  symmetric_heap(const symmetric_heap&) = delete;
  symmetric_heap& operator=(const symmetric_heap&) = delete;

  /// Collective: waits for every stream that used the heap, and closes the region. What needs its
  /// memory is an invalid_argument from then on; a second close does nothing.
  void close(const uses& in_use = {});

  // --- allocate and free ----------------------------------------------------------------------

  /// Returns the offset, the same on every rank. 0 bytes take the least block. Collective only when
  /// the heap is full and grows. Throws invalid_argument for what cannot be, and on a stream that
  /// is being captured: allocate before, the address stays.
  [[nodiscard]] std::size_t allocate(std::size_t bytes, native_stream stream = nullptr,
                                     const symmetric_request& request = {});
  /// Throws invalid_argument naming an offset where no live allocation begins. Under a capture of
  /// a stream that used it the block stays out of use until that capture has ended. When the driver
  /// fails, the allocation is gone all the same: the next call that needs its block tries again.
  void free(std::size_t offset);
  /// free() for destructors: what it throws is logged. Does nothing after close().
  void release(std::size_t offset) noexcept;
  /// Another stream uses the allocation too: who gets the block next waits for it as well.
  void record_stream(std::size_t offset, native_stream stream);
  /// Bytes of the live allocation that begins here, as asked for.
  std::size_t size_of(std::size_t offset) const;
  std::byte* local(std::size_t offset) const { return region().local() + offset; }
  std::byte* peer(rank_id rank, std::size_t offset) const { return region().peer(rank) + offset; }

  // --- pools ----------------------------------------------------------------------------------

  /// A pool has segments of its own, so that what is cold together moves together (migrate).
  pool_id create_pool(const symmetric_pool_options& options = {});
  /// Its segments become the default pool's. Throws invalid_argument while anything lives in it.
  void release_pool(pool_id pool);

  // --- collective changes ---------------------------------------------------------------------

  /// Appends free memory to a pool, in the same tier on all ranks. Rounding as the region's.
  /// Throws out_of_memory beyond the limit of any rank.
  grown grow(tier kind, std::size_t bytes, pool_id pool = {});
  /// Local: asks for `bytes` more in the default pool. Done when the heap is full next, or at
  /// verify(), by the largest amount that any rank asked for; not an error when there is no room.
  void request_growth(tier kind, std::size_t bytes);
  /// Gives back segments at the end that are free, as long as at least `keep_free` bytes stay
  /// free, and the handles kept for reuse. Waits for the streams that used them and for `in_use`.
  /// Returns the bytes given back.
  std::size_t trim(std::size_t keep_free = 0, const uses& in_use = {});
  /// Moves the segments that hold any of [offset, offset + bytes) to `kind`, contents and addresses
  /// kept. Waits for every stream that used what lies in them, and for `in_use`. Segments move one
  /// after the other, each on all ranks or on none; when one fails those before it have moved.
  /// Returns the bytes moved. Throws invalid_argument when a device_only allocation that lies
  /// partly outside of the range would leave the device, and out_of_memory, with nothing moved,
  /// beyond the limit of any rank.
  std::size_t migrate(std::size_t offset, std::size_t bytes, tier kind, const uses& in_use = {});
  /// All segments of a pool.
  std::size_t migrate(pool_id pool, tier kind, const uses& in_use = {});
  /// Merges neighbouring segments of one pool that lie in the same tier into one handle each, as
  /// symmetric_region::compact; where memory is too short for that, parts of them. Waits for every
  /// stream that used them, and for `in_use`. Returns how many segments are left.
  std::size_t compact(const uses& in_use = {});
  /// Compares what the ranks have called.
  void verify();

  // --- what happens ---------------------------------------------------------------------------

  /// Collective: the memory of all ranks.
  heap_report report();
  /// This rank's, with the allocator's names; blocks count as small up to 1 MiB.
  allocator_statistics statistics() const;
  void reset_peaks();
  void reset_totals();
  void record_history(const history_options& options);
  void annotate(std::vector<std::pair<std::string, std::string>> values);
  [[nodiscard]] caching_allocator::subscription on_trace(
      std::function<void(const trace_entry&)> observer);
  /// Segments, blocks and history of this rank; the rank is among the settings.
  allocator_snapshot snapshot(bool traces = true) const;

  /// To look at, to observe and for windows. Its changes are the heap's to make.
  symmetric_region& region() const;
  /// Checksum of all calls so far: equal on all ranks that made the same.
  std::uint64_t checksum() const noexcept;
  /// Throws std::logic_error when the books contradict themselves; for tests.
  void check_invariants() const;

 private:
  struct state;
  std::unique_ptr<state> state_;
};

}  // namespace evmm
