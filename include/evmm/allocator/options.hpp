// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/topology.hpp>

#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Who serves the allocations.
enum class allocator_backend : std::uint8_t {
  native,             ///< evmm's caching allocator
  cuda_malloc_async,  ///< the driver's stream-ordered allocator; most other options are ignored
  none,               ///< no caching: memory is created and released at each call (debugging)
};

/// Whether a physical handle that no live block touches may be mapped elsewhere, rather than make
/// a new one.
enum class recycling : std::uint8_t {
  never,  ///< handles stay where they are until they are released
  ready,  ///< those whose last use is over
  wait,   ///< also those still in use on another stream: the taking stream waits for that one
};

/// How a block that other streams used (record_stream) comes back.
enum class cross_stream_reuse : std::uint8_t {
  by_event,  ///< when events show that those streams are past it; polled
  by_wait,   ///< at once: the stream that owns the block waits for those streams
};

/// An amount of addresses: bytes, or a fraction of the device's memory. After 32 expandable
/// segments the next reserve half of it, then a quarter, down to 1/64, or what the request needs.
struct reservation {
  std::size_t bytes = 0;    ///< used when not 0
  double fraction = 1.125;  ///< of the device's total memory; addresses are not memory
  friend bool operator==(const reservation&, const reservation&) = default;
};

/// `roundup_power2_divisions`: requests are rounded up to one of `divisions` steps between powers
/// of two. Each step holds for sizes from its boundary up to the next.
struct rounding_step {
  std::size_t from = 0;    ///< bytes, a power of two, or 0 for the first
  unsigned divisions = 0;  ///< a power of two; 0 and 1 round to multiples of the least block
  friend bool operator==(const rounding_step&, const rounding_step&) = default;
};

/// Options of the pinned host allocator (keys `pinned_*`).
struct pinned_options {
  bool use_host_register = false;   ///< ordinary pages that are then registered, not cuMemAllocHost
  unsigned register_threads = 1;    ///< a power of two up to 128; touch pages side by side
  bool background_thread = false;   ///< finished events are polled by a thread of their own
  std::size_t reserve_segment = 0;  ///< bytes set aside at first use; small requests come from it
  /// Requests up to this size are rounded up to a power of two. PyTorch does so without limit,
  /// which wastes up to half; the default here is not to.
  std::size_t max_round_threshold = 0;
  std::optional<std::size_t> max_cached_size = {};  ///< larger blocks are given back when freed
  bool free_catch_all = false;    ///< errors while giving memory back are logged, not thrown
  host_placement placement = {};  ///< the NUMA node; nearest to the device by default
  friend bool operator==(const pinned_options&, const pinned_options&) = default;
};

/// What a caching_allocator is made from. Defaults are PyTorch's, except that segments expand and
/// handles are recycled. Every member is also a key of the configuration string (parse_options).
struct allocator_options {
  allocator_backend backend = allocator_backend::native;

  // --- blocks ---------------------------------------------------------------------------------
  std::size_t min_block = 512;                        ///< a power of two; sizes are multiples of it
  std::size_t small_limit = std::size_t{1} << 20;     ///< up to here a request is small
  std::size_t small_segment = std::size_t{2} << 20;   ///< what the small pool takes at a time
  std::size_t large_segment = std::size_t{20} << 20;  ///< what requests under min_large take
  std::size_t min_large = std::size_t{10} << 20;  ///< from here on a request gets its own segment
  std::vector<rounding_step> roundup_power2_divisions = {};
  std::optional<std::size_t> max_split_size = {};          ///< larger free blocks are not split
  std::optional<std::size_t> max_non_split_rounding = {};  ///< large_segment unless set

  // --- limits and giving back -----------------------------------------------------------------
  double garbage_collection_threshold = 0;  ///< in (0, 1); 0 is off
  double per_process_memory_fraction = 1;   ///< [0, 1] of the device's memory
  bool throw_on_device_oom =
      false;  ///< refuse before the driver is asked (throw_on_cudamalloc_oom)
  /// Changes nothing here: while the driver makes memory for one stream, the others are served from
  /// what they have cached, unless they have handles to give (release_lock_on_cudamalloc).
  bool release_lock_on_device_alloc = false;

  // --- expandable segments --------------------------------------------------------------------
  bool expandable_segments = true;
  reservation expandable_segments_reserve = {};
  std::map<std::string, reservation> expandable_segments_reserve_by_class = {};
  recycling recycle = recycling::ready;
  /// How much more than what was ever live at one time may be held before handles are moved instead
  /// of made: [0, 1] of it. More is faster where sizes are random, and holds more.
  double recycle_slack = 0.02;
  std::size_t min_handle = std::size_t{2} << 20;   ///< rounded up to the granularity
  std::size_t max_handle = std::size_t{64} << 20;  ///< a power of two times min_handle
  /// A new handle is at most 1/handle_fraction of what the allocator holds.
  unsigned handle_fraction = 48;

  // --- streams --------------------------------------------------------------------------------
  cross_stream_reuse reuse = cross_stream_reuse::by_event;
  bool graph_capture_record_stream_reuse = false;

  // --- memory ---------------------------------------------------------------------------------
  share_kind share = share_kind::fd;  ///< how handles can leave the process (IPC)
  std::vector<device_id> peers = {};  ///< devices that may touch all memory from the start
  host_placement host = {};           ///< nodes of the host tier

  pinned_options pinned = {};

  friend bool operator==(const allocator_options&, const allocator_options&) = default;
};

/// Reads PyTorch's grammar, `key:value,key:value` with lists as `[a:b,...]`; white space is
/// ignored, booleans are `True` and `False`. Knows every key of PYTORCH_ALLOC_CONF, and beyond:
/// `recycle_handles` (never, ready, wait), `recycle_slack`, `cross_stream_reuse` (event, wait),
/// `min_handle_size_mb`, `max_handle_size_mb`, `handle_fraction`, `min_block_size`,
/// `small_limit_kb`, `small_segment_size_mb`, `min_large_size_mb`, `share` (none, fd, fabric),
/// `peers` (`[1,2]`), `host_placement` and `pinned_placement` (`nearest`, `interleave`, or a list
/// as `[bind,0]`), and `backend:none`. Sizes may carry a unit of their own (`512K`, `40G`). Keys
/// that the string does not name keep what `base` has. Throws invalid_argument that names the
/// position (1 is the first character), the key or value, what is allowed, and the nearest key.
allocator_options parse_options(std::string_view text, const allocator_options& base = {});

/// From EVMM_ALLOC_CONF, else PYTORCH_ALLOC_CONF, else PYTORCH_CUDA_ALLOC_CONF, else the defaults.
/// EVMM_NO_CACHING=1, or PYTORCH_NO_CUDA_MEMORY_CACHING=1, sets backend none. Errors name the
/// variable.
allocator_options options_from_environment();

/// Throws invalid_argument for values that cannot be, alone or together.
void check(const allocator_options& options);

/// The string that parse_options reads back to `options`: only what differs from the defaults.
std::string to_string(const allocator_options& options);

}  // namespace evmm
