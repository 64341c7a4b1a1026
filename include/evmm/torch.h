/* SPDX-License-Identifier: Apache-2.0 */
/**
 * @file
 * evmm's caching allocator behind PyTorch: the functions of libevmm_torch.so. C, without a header
 * of PyTorch or CUDA; PyTorch finds them by name (lib/torch/evmm_torch.py does so for a user).
 *
 * Devices: CUDA ordinals, as PyTorch passes them. Each has one allocator, made at its first use on
 * the process's driver from the environment's options (EVMM_ALLOC_CONF, else PYTORCH_ALLOC_CONF)
 * and evmm_torch_configure(). It lives as long as the process.
 * Units: bytes.
 * Threads: every function from any thread.
 * Streams: memory belongs to the stream it was allocated on; a use on another one is told by
 *   evmm_torch_record_stream(). The stream is a cudaStream_t.
 * Errors: functions that return int return a code; evmm_torch_last_error() has the calling thread's
 *   last message. The hooks, which PyTorch calls, have no code to return. In a process in which
 *   PyTorch is loaded they raise what becomes a Python exception: torch.OutOfMemoryError when
 * memory has run out, RuntimeError for the rest. Elsewhere they return null, or nothing, with the
 * message set. Functions that free never raise: they log.
 */
#pragma once

#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifdef __cplusplus
#define EVMM_TORCH_API extern "C" __attribute__((visibility("default")))
#else
#define EVMM_TORCH_API __attribute__((visibility("default")))
#endif

/** What a cudaStream_t points to; null is the default stream. */
struct CUstream_st;

/** PyTorch's name of a pool (MempoolId_t). Passed in registers, as std::pair of the same is. */
struct evmm_torch_pool {
  uint64_t first;  /**< of a graph, 0 for a pool of the user's */
  uint64_t second; /**< of the user's, 0 for a pool of a graph */
};

/** What went wrong. Codes do not change their meaning. */
enum evmm_torch_code {
  EVMM_TORCH_OK = 0,
  EVMM_TORCH_INVALID_ARGUMENT = -1,
  EVMM_TORCH_OUT_OF_MEMORY = -2,
  EVMM_TORCH_DRIVER_ERROR = -3,
  EVMM_TORCH_PEER_ERROR = -4,
  EVMM_TORCH_UNSUPPORTED = -5,
  EVMM_TORCH_TIMED_OUT = -6,
  EVMM_TORCH_FAILED = -7 /**< something else; the message says what */
};

/** The message of the calling thread's last failure; "" after a call that worked. Valid until the
 * thread's next call. */
EVMM_TORCH_API const char* evmm_torch_last_error(void);
/** The code (evmm_torch_code) that goes with it. */
EVMM_TORCH_API int evmm_torch_last_code(void);
/** The version of evmm, "0.1.0". */
EVMM_TORCH_API const char* evmm_torch_version(void);

/* --- hooks: PyTorch's current allocator --------------------------------------------------------
 * For torch.cuda.memory.CUDAPluggableAllocator and the set_ functions of its allocator(). */

/** Null for 0 bytes. Does not synchronise unless memory has run out. Raises. */
EVMM_TORCH_API void* evmm_torch_alloc(ssize_t bytes, int device, struct CUstream_st* stream);
/** Null is ignored. The size and the stream are those of the allocation, which evmm knows. An
 * unknown pointer is logged. In a forked child nothing happens. */
EVMM_TORCH_API void evmm_torch_free(void* at, ssize_t bytes, int device,
                                    struct CUstream_st* stream);
/** set_record_stream_fn: as caching_allocator::record_stream, without effect for null and foreign
 * pointers. Raises. */
EVMM_TORCH_API void evmm_torch_record_stream(void* at, struct CUstream_st* stream);
/** set_base_alloc_fn: where the memory that holds `at` begins, and into *bytes (unless null) how
 * much there is. Raises for a pointer that is not a live allocation. */
EVMM_TORCH_API void* evmm_torch_base(void* at, size_t* bytes);
/** set_reset_fn: what torch.cuda.empty_cache() calls. Gives the cached memory of all devices back,
 * waiting for the streams that used it. Raises. */
EVMM_TORCH_API void evmm_torch_reset(void);
/** set_memory_fraction_fn: [0, 1] of the device's memory. Raises. */
EVMM_TORCH_API void evmm_torch_set_fraction(double fraction, int device);
/** set_begin_allocate_to_pool: from now on allocations on streams for which `filter` is true go to
 * this pool, which is made at its first use and is taken to serve a graph capture: until the end,
 * frees of blocks that other streams used are deferred. Each call is one more user of the pool.
 * `filter` is a std::function<bool(cudaStream_t)>: by value in C++, which is its address here; it
 * is copied. Raises. */
EVMM_TORCH_API void evmm_torch_begin_allocate_to_pool(int device, struct evmm_torch_pool pool,
                                                      void* filter);
/** set_end_allocate_to_pool_fn: ends the last begin of this pool. Raises. */
EVMM_TORCH_API void evmm_torch_end_allocate_to_pool(int device, struct evmm_torch_pool pool);
/** set_release_pool: one user less. After the last one its memory may serve others. Logs. */
EVMM_TORCH_API void evmm_torch_release_pool(int device, struct evmm_torch_pool pool);

/* --- host memory -------------------------------------------------------------------------------
 * Two ways to tensors that lie in host memory where the device is full, reached by the device at
 * their addresses, over its link to the host.
 *
 * Behind torch.cuda.MemPool, while PyTorch's own allocator is the current one: the pairs below.
 * They return null when both tiers are full, which PyTorch turns into torch.OutOfMemoryError after
 * it has given its own cache back; they never raise. What PyTorch frees goes back to the driver.
 *
 * While evmm is PyTorch's allocator, which then cannot make a MemPool: evmm_torch_begin_tiers(). */

/** On the device, and in host memory from where the device is full (or its fraction is reached). */
EVMM_TORCH_API void* evmm_torch_host_tier_alloc(ssize_t bytes, int device,
                                                struct CUstream_st* stream);
/** Frees what evmm_torch_host_tier_alloc returned, and gives its memory back. */
EVMM_TORCH_API void evmm_torch_host_tier_free(void* at, ssize_t bytes, int device,
                                              struct CUstream_st* stream);
/** In host memory alone. */
EVMM_TORCH_API void* evmm_torch_host_only_alloc(ssize_t bytes, int device,
                                                struct CUstream_st* stream);
/** Frees what evmm_torch_host_only_alloc returned, and gives its memory back. */
EVMM_TORCH_API void evmm_torch_host_only_free(void* at, ssize_t bytes, int device,
                                              struct CUstream_st* stream);

/** Which tiers serve a request. */
enum evmm_torch_tiers { EVMM_TORCH_DEVICE_THEN_HOST = 0, EVMM_TORCH_HOST_ONLY = 1 };

/** From now on what the calling thread allocates by evmm_torch_alloc on this device comes from
 * these tiers (evmm_torch_tiers); what it allocates on a captured stream comes from the graph's
 * pool all the same. May be nested; frees are as ever. */
EVMM_TORCH_API int evmm_torch_begin_tiers(int device, int tiers);
/** Ends the last begin of the same tiers, in the thread that began. */
EVMM_TORCH_API int evmm_torch_end_tiers(int device, int tiers);

/* --- for programs ------------------------------------------------------------------------------
 */

/** Changes options of all devices from a string, as PyTorch's allocator settings: for what is
 * allocated from now on. What only a new allocator can take (backend) must come before the first
 * use of a device. */
EVMM_TORCH_API int evmm_torch_configure(const char* text);
/** As evmm_torch_reset, of one device. */
EVMM_TORCH_API int evmm_torch_empty_cache(int device);
/** Writes the statistics as one JSON object of integers to `json`, at most `bytes` with the ending
 * 0. Names are those of torch.cuda.memory_stats ("allocated_bytes.all.current", "num_ooms",
 * "reserved_bytes_by_private_pools.7_0.all.peak" of the pool that PyTorch calls (7, 0)) and evmm's
 * own ("host_tier_bytes", "mapped_bytes", "handles_recycled", "handles_claimed"). Returns
 * the length of the whole text, as snprintf does, or a negative code. `json` may be null with 0
 * bytes.
 */
EVMM_TORCH_API int evmm_torch_statistics(int device, char* json, size_t bytes);
/** Peaks begin anew at what is current. */
EVMM_TORCH_API int evmm_torch_reset_peaks(int device);
/** Sums and counts ("....allocated", "....freed", "num_ooms") begin anew at 0. */
EVMM_TORCH_API int evmm_torch_reset_totals(int device);
/** Writes the pickle that torch.cuda.memory._dump_snapshot would, for PyTorch's memory viewer.
 * Device -1 is every device in use. Pools have PyTorch's names; those behind evmm_torch_begin_tiers
 * and the pairs above, which have none there, have one number twice. */
EVMM_TORCH_API int evmm_torch_snapshot(int device, const char* path);
/** What is recorded for snapshots: `level` is "off", "state" (stacks of what is live), "alloc" or
 * "all"; `stacks`, when not 0, adds C++ stacks; `max_entries` events are kept. Earlier events are
 * forgotten. Device -1 is every device, in use or to come. */
EVMM_TORCH_API int evmm_torch_record_history(int device, const char* level, int stacks,
                                             size_t max_entries);
