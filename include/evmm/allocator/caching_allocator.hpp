// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/options.hpp>
#include <evmm/allocator/snapshot.hpp>
#include <evmm/allocator/statistics.hpp>
#include <evmm/driver.hpp>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// A pool of an allocator; pool_id{} is the default one.
enum class pool_id : std::uint64_t {};

/// User functions behind a pool. Called with the allocator's slow path locked: they may not call
/// the allocator.
struct pool_functions {
  /// Returns memory of at least `bytes`, aligned to 512 and not in use, or null when there is none.
  /// Other memory is an invalid_argument of the request.
  std::function<void*(std::size_t bytes, device_id device, native_stream stream)> allocate;
  std::function<void(void* at, std::size_t bytes, device_id device)> free;
};

/// What a pool is made from.
struct pool_options {
  /// Requests of the default pool may use this pool's free blocks before they fail, unless a graph
  /// may replay on them.
  bool use_on_oom = false;
  /// Free blocks are handed out whole.
  bool no_split = false;
  /// Where its memory comes from: `device` alone, or `device` and then `host` when it is full, or
  /// `host` alone (tiers in order of preference).
  std::vector<tier> tiers = {tier::device};
  /// Whether one allocation may lie partly in each tier, where segments expand. Kernels do not
  /// notice; but one cudaMemcpyAsync over both crashes in libcuda 580, so copy with copy() then.
  bool may_span = false;
  /// Memory from the user instead of from evmm.
  std::optional<pool_functions> functions = {};
  /// The pool's own choice; the allocator's when empty.
  std::optional<bool> expandable_segments = {};
};

/// One allocation's place in the segment that holds it.
struct allocation_place {
  void* base = nullptr;         ///< of the contiguous mapped run that holds it
  std::size_t bytes = 0;        ///< of that run
  std::size_t offset = 0;       ///< of the allocation in it
  std::size_t block_bytes = 0;  ///< of the allocation, rounded
};

/// Cached memory, as PyTorch's cacheInfo.
struct cache_information {
  std::size_t cached_bytes = 0;   ///< free and held
  std::size_t largest_block = 0;  ///< of those
};

/// All memory of one device, in one report.
struct memory_report {
  std::size_t total_bytes = 0;      ///< of the device
  std::size_t free_bytes = 0;       ///< of the device, for anybody
  std::size_t allocated_bytes = 0;  ///< live blocks
  std::size_t active_bytes = 0;     ///< live or waiting for streams
  std::size_t requested_bytes = 0;
  std::size_t reserved_bytes = 0;   ///< held from the driver, DEVICE tier
  std::size_t mapped_bytes = 0;     ///< addresses that are backed
  std::size_t host_tier_bytes = 0;  ///< held from the driver, HOST_NUMA tier
  /// In use on the device beyond what this allocator holds: other processes, contexts, libraries.
  std::size_t outside_bytes = 0;
  std::string text() const;
};

/// Mapped bytes of an expandable range.
struct expandable_size {
  native_stream stream = nullptr;
  bool large = false;
  pool_id pool{};
  std::size_t mapped_bytes = 0;
  std::size_t reserved_bytes = 0;  ///< addresses
};

/// What an out-of-memory observer is told. Called with no lock held, before the exception.
struct oom_report {
  device_id device;
  std::size_t requested_bytes = 0;
  std::size_t allowed_bytes = 0;  ///< the limit of this process
  std::size_t total_bytes = 0;
  std::size_t free_bytes = 0;
  bool rejected = false;  ///< refused before the driver was asked
};

enum class history_level : std::uint8_t {
  off,
  state,  ///< stacks of what is live only
  alloc,  ///< events too, stacks for allocations
  all,    ///< stacks for frees as well
};

/// What record_history() keeps.
struct history_options {
  history_level level = history_level::all;
  bool stacks = false;  ///< C++ return addresses, resolved when a snapshot is taken
  std::size_t max_entries = std::size_t{1} << 16;
  bool clear = true;  ///< forget what was recorded before
  std::vector<trace_action> skip = {};
};

/// What crosses to another process for one allocation; plain bytes.
struct ipc_handle {
  std::string bytes;     ///< identifies allocation, owner and layout
  std::vector<int> fds;  ///< owned by the caller; travel by SCM_RIGHTS
};

/// The state of a private pool between graph captures.
class pool_checkpoint;

/// PyTorch's caching allocator for one device, without PyTorch.
///
/// Addresses: a live allocation stays where it is. Multiples of 512, or of
///   allocator_options::min_block where that is less.
/// Units: bytes.
/// Threads: every member from any thread. Streams of different threads share no lock as long as
///   requests are served from what is cached.
/// Streams: memory belongs to the stream it was allocated on: work enqueued there before a free is
///   over before the next user's work begins. A use on another stream is told by record_stream;
///   that stream must exist until the free. allocate() and free() do not synchronise, unless memory
///   has run out. A stream with cached memory is asked later whether it is idle, and waited for:
///   before it is destroyed, free what was allocated on it and call empty_cache(), or keep it until
///   the allocator goes. CUDA's per-thread default stream, one name for many streams, is
///   unsupported.
/// Errors: out_of_memory says what was asked, what is held, why it does not serve, and which option
///   helps; the allocator stays usable. free() of an unknown pointer is an invalid_argument. A
///   forked child may destroy its copy and free, which leaves everything to the parent; other calls
///   are an invalid_argument there.
class caching_allocator {
 public:
  caching_allocator(std::shared_ptr<driver> on, device_id device,
                    const allocator_options& options = options_from_environment());
  /// Waits for its streams, and for those that record_stream told of, and gives everything back.
  /// Live allocations die with it, with a warning.
  ~caching_allocator();
  caching_allocator(const caching_allocator&) = delete;
  caching_allocator& operator=(const caching_allocator&) = delete;

  // --- allocate and free ----------------------------------------------------------------------

  /// Null for 0 bytes. Throws invalid_argument at 1 EiB and above, out_of_memory.
  [[nodiscard]] void* allocate(std::size_t bytes, native_stream stream = nullptr);
  /// Null is ignored. Throws invalid_argument naming a pointer that is not a live allocation; with
  /// the other backends unsupported while a stream that uses it is being captured.
  void free(void* at);
  /// At this very address, which must be free, backed, of this stream and of the pool that the
  /// request would use, a multiple of 512, and with no_split where a free block begins. Null when
  /// it is not. Never makes new memory.
  [[nodiscard]] void* allocate_at(void* where, std::size_t bytes, native_stream stream = nullptr);
  /// Another stream uses the allocation too: after free() it is not reused before that stream is
  /// past what it has enqueued until then. No effect for null, foreign pointers, and the stream of
  /// the allocation itself.
  void record_stream(void* at, native_stream stream);
  /// Where `at`, a live allocation, lies. Throws invalid_argument for other pointers.
  allocation_place base_allocation(const void* at) const;
  /// Whether `at` is a live allocation of this allocator; never in a forked child.
  bool owns(const void* at) const noexcept;
  /// Copies in stream order, between live allocations or ordinary memory.
  void copy(void* to, const void* from, std::size_t bytes, native_stream stream);

  // --- giving back ----------------------------------------------------------------------------

  /// Gives back all cached memory (of one pool, when named), waiting for the streams that used it.
  /// Returns the bytes given back to the driver.
  std::size_t empty_cache(std::optional<pool_id> pool = {});
  cache_information cache_info() const;
  memory_report report() const;
  /// [0, 1] of the device's memory; lower than what is held is allowed. Limits what the native
  /// backend holds, and what is allocated from the others.
  void set_memory_fraction(double fraction);
  double memory_fraction() const;
  /// The options now, with run-time changes.
  allocator_options options() const;
  /// Changes what PyTorch too changes while running, from a string: max_split_size_mb,
  /// garbage_collection_threshold, roundup_power2_divisions, expandable_segments and so on, for
  /// what is allocated from now on. backend, min_block_size, small_limit_kb, host_placement and
  /// share cannot change, and no peer can be taken away.
  void configure(std::string_view text);

  // --- expandable segments --------------------------------------------------------------------

  std::vector<expandable_size> expandable_sizes() const;
  /// The class of a stream, for expandable_segments_reserve_by_class. Before its first allocation.
  void set_stream_class(native_stream stream, const std::string& name);
  /// Lets `peer` touch all memory of this allocator, existing and future, and what it imports.
  /// Throws unsupported when it cannot reach it, and with backend:cudaMallocAsync.
  void enable_peer(device_id peer);

  // --- pools ----------------------------------------------------------------------------------

  pool_id create_pool(const pool_options& options = {});
  /// One more user of the pool; release_pool() drops one. The creator is the first.
  void retain_pool(pool_id pool);
  /// When the last user is gone and nothing lives in the pool, all of it is given back at once,
  /// waiting for its streams. Otherwise what is free in it, then or later, comes back at the next
  /// empty_cache(), retry or collection, or when a request needs it elsewhere. Graphs that
  /// allocated from it must not be launched any more; the last user's release waits for those that
  /// run on streams with memory of this allocator.
  void release_pool(pool_id pool);
  int pool_use_count(pool_id pool) const;
  /// From now on allocations for which `filter` is true go to the pool. The last begun is asked
  /// first. The filter may not call the allocator.
  void begin_allocate_to_pool(pool_id pool, std::function<bool(native_stream)> filter);
  /// The calling thread's allocations.
  void begin_allocate_to_pool(pool_id pool);
  /// The last begun to that pool, by the calling thread if it began any.
  void end_allocate_to_pool(pool_id pool);
  /// Whether the live allocations of the pool are exactly these.
  bool live_allocations_are(pool_id pool, const std::vector<void*>& expected) const;

  // --- graph capture --------------------------------------------------------------------------

  /// A capture that allocates from `pool`, not the default one nor one that was released, begins or
  /// has ended. Between the two, frees of blocks that other streams used are deferred, unless their
  /// reuse is proved by the capture itself (graph_capture_record_stream_reuse).
  void begin_capture(pool_id pool);
  void end_capture(pool_id pool);
  std::shared_ptr<const pool_checkpoint> checkpoint(pool_id pool);
  /// What restore() changed.
  struct checkpoint_delta {
    std::vector<void*> freed;      ///< live before, not live in the checkpoint
    std::vector<void*> allocated;  ///< live in the checkpoint, not before
  };
  /// Makes the pool's live allocations what they were. Throws invalid_argument when the memory of
  /// the checkpoint is no longer the pool's.
  checkpoint_delta restore(pool_id pool, const pool_checkpoint& to);

  // --- other processes ------------------------------------------------------------------------

  ipc_handle export_allocation(const void* at);
  /// The same memory, as long as the pointer lives; the same handle twice is mapped once.
  std::shared_ptr<void> import_allocation(const ipc_handle& handle);

  // --- what happens ---------------------------------------------------------------------------

  allocator_statistics statistics() const;
  /// Of one pool, and as it is now: of its past only reserved_bytes tells.
  allocator_statistics statistics(pool_id pool) const;
  void reset_peaks();
  void reset_totals();
  void record_history(const history_options& options);
  void annotate(std::vector<std::pair<std::string, std::string>> values);
  /// Texts that go into the calling thread's events until they are popped or replaced.
  static void push_compile_context(std::string text);
  static void pop_compile_context();
  static void set_user_metadata(std::string text);
  allocator_snapshot snapshot(std::optional<pool_id> pool = {}, bool traces = true) const;

  using subscription = std::shared_ptr<void>;
  [[nodiscard]] subscription on_out_of_memory(std::function<void(const oom_report&)> observer);
  /// Called for each event: before memory is unmapped or given back, after it is mapped or taken.
  /// May not call the allocator.
  [[nodiscard]] subscription on_trace(std::function<void(const trace_entry&)> observer);
  /// May free allocations; asked when there is no free block. Returns whether it freed anything.
  /// Where it allocates itself, nobody is asked.
  [[nodiscard]] subscription on_shortage(std::function<bool()> callback);

  device_id device() const noexcept;
  driver& on() const noexcept;
  /// Throws std::logic_error when the books contradict themselves; for tests. Takes every lock.
  void check_invariants() const;

  struct state;  ///< internal

 private:
  std::unique_ptr<state> state_;
};

}  // namespace evmm
