// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>
#include <evmm/unique_fd.hpp>

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// A driver's name for one piece of physical memory (CUmemGenericAllocationHandle).
enum class allocation_handle : std::uint64_t {};

/// What leaves the process to share a handle over NVLink fabric (CUmemFabricHandle).
using fabric_handle = std::array<std::byte, 64>;

enum class driver_kind : std::uint8_t { host, cuda };

/// How handles can leave the process.
enum class share_kind : std::uint8_t {
  none,
  fd,      ///< POSIX file descriptor, within one operating system
  fabric,  ///< fabric handle, within one NVLink domain
};

/// The driver itself.
struct driver_info {
  driver_kind kind = driver_kind::host;
  std::string name;             ///< "cuda" or "host"
  std::string version;          ///< "13.0 (580.159.04)", as far as the driver tells
  bool fd_sharing = false;      ///< export_fd works
  bool fabric_sharing = false;  ///< proved by creating, exporting and importing a handle
};

/// One device.
struct device_description {
  device_id id;
  std::string name;
  std::string pci_bus_id;  ///< "0000:1b:00.0", lower case; empty on the host driver
  std::size_t total_bytes = 0;
  std::optional<numa_node> host_node;  ///< what the driver says is near; a hint, may be wrong
  int multiprocessors = 0;             ///< 0 on the host driver
  bool rdma_capable = false;           ///< GPUDirect RDMA with VMM memory
  bool host_memory = false;            ///< HOST_NUMA memory can be created and mapped
};

/// Bytes of a device or a NUMA node.
struct memory_usage {
  std::size_t free_bytes = 0;
  std::size_t total_bytes = 0;
};

/// Memory that one process holds on a device.
struct process_usage {
  int pid = 0;            ///< as the machine counts; in a container perhaps not as getpid() does
  std::size_t bytes = 0;  ///< 0 where the driver does not tell
  bool this_process = false;
};

/// Memory of a device's stream-ordered allocator, for the whole process.
struct async_memory {
  std::size_t reserved_bytes = 0;  ///< held from the device: used or cached
  std::size_t used_bytes = 0;      ///< allocated, and freed by work that is not yet done
  std::size_t reserved_peak = 0;   ///< the highest so far
  std::size_t used_peak = 0;
};

/// What create() makes.
struct allocation_request {
  std::size_t bytes = 0;  ///< a multiple of granularity(where)
  memory_location where;
  share_kind share = share_kind::fd;
  bool rdma = false;  ///< ask for GPUDirect RDMA; DEVICE only
};

enum class access_kind : std::uint8_t { none, read, read_write };

/// Who may touch a mapped range. A host location means the CPUs.
struct access_grant {
  memory_location who;
  access_kind kind = access_kind::read_write;
  friend bool operator==(const access_grant&, const access_grant&) = default;
};

enum class capture_status : std::uint8_t { none, active, invalidated };

/// Which capture a stream is in, if any.
struct capture_info {
  capture_status status = capture_status::none;
  std::uint64_t id = 0;  ///< unique among the process's captures; 0 unless active
};

/// A driver's name for one node of the graph that a capture builds (CUgraphNode).
enum class graph_node : std::uint64_t {};

/// The seam to the machine: each member is one primitive of the CUDA driver, and everything above
/// it is written against this class alone.
///
/// Addresses: as CUDA's virtual memory management has them. Physical memory is created by handle
///   and mapped, whole and at offset 0, into a reserved range; a mapping keeps the memory alive
///   after release().
/// Units: bytes. Sizes and addresses given to reserve, create, map, unmap and set_access are
///   multiples of granularity().
/// Threads: every member may be called from any thread at any time.
/// Streams: members that take a stream return before the work is done; all others are finished
///   when they return, and none of the memory members waits for a running kernel, save those of
///   page-locked memory, where CUDA may.
/// Errors: invalid_argument for what the caller could have known, out_of_memory from create, pin
///   and the allocate_ members, unsupported, and driver_error with the native code for the rest; a
///   failed call changed nothing. A call in a forked child is an invalid_argument: CUDA does not
///   survive a fork.
class driver {
 public:
  driver(const driver&) = delete;
  driver& operator=(const driver&) = delete;
  virtual ~driver() = default;

  // --- what is here ---------------------------------------------------------------------------

  virtual driver_info info() const = 0;
  virtual int device_count() const = 0;
  /// Throws invalid_argument for a device that does not exist.
  virtual device_description describe(device_id device) const = 0;
  /// Free and total bytes of a device (all processes) or of a NUMA node.
  virtual memory_usage usage(memory_location where) const = 0;
  /// The processes that use the device, in no order. Empty where the machine does not tell: on
  /// CUDA it is asked through NVML, which need not be there. Cost: milliseconds; for messages.
  virtual std::vector<process_usage> processes(device_id device) const = 0;
  /// Whether `from` can load and store memory of `to`; true for a device and itself.
  virtual bool can_access(device_id from, device_id to) const = 0;
  /// Whether kernels may touch what lies at an address, by what the driver knows of it: mapped,
  /// page-locked or stream-ordered memory, made by whomever in this process. copy() takes any
  /// other memory of the process as well, on which a kernel faults.
  virtual bool kernels_reach(address at) const = 0;
  /// The device that calls of the CUDA runtime mean on this thread (cudaGetDevice); nullopt while
  /// the thread has none, which they take for device 0.
  virtual std::optional<device_id> current_device() const = 0;
  /// Makes it this thread's (cudaSetDevice), for libraries that take the device from the thread;
  /// nullopt leaves the thread without one.
  virtual void set_current_device(std::optional<device_id> device) = 0;
  /// NUMA nodes that have memory, ascending. Not each can serve create(): prove it by trying.
  virtual std::vector<numa_node> numa_nodes() const = 0;

  // --- addresses ------------------------------------------------------------------------------

  /// The unit of reserve, create, map and access at this location; a power of two.
  virtual std::size_t granularity(memory_location where) const = 0;
  /// Reserves addresses without memory. `alignment` is a power of two, 0 for the granularity;
  /// `hint` is tried first and honoured when free. Cost: microseconds, whatever the size.
  virtual address reserve(std::size_t bytes, std::size_t alignment = 0, address hint = 0) = 0;
  /// Gives a reserved range back, whole. Nothing may be mapped in it.
  virtual void free(address base, std::size_t bytes) = 0;

  // --- physical memory ------------------------------------------------------------------------

  /// Creates physical memory. Cost: tens of us for DEVICE; about 250 ms a GiB for HOST_NUMA,
  /// whose pages are zeroed and pinned (FACTS: 2.6-4.1 GiB/s, no faster with threads).
  /// Throws out_of_memory; invalid_argument for a location that does not exist.
  virtual allocation_handle create(const allocation_request& request) = 0;
  /// Drops the caller's reference. Memory still mapped somewhere, or imported by another
  /// process, lives on.
  virtual void release(allocation_handle handle) = 0;

  // --- mapping --------------------------------------------------------------------------------

  /// Maps the whole handle at `at`, inside one reserved range where nothing is mapped. It cannot
  /// be touched until set_access.
  virtual void map(address at, std::size_t bytes, allocation_handle handle) = 0;
  /// Unmaps exactly one earlier map(). The caller has made sure that no stream uses it.
  virtual void unmap(address at, std::size_t bytes) = 0;
  /// Sets who may touch [at, at + bytes), which is fully mapped and ends on mapping boundaries.
  /// Those not named keep what they had. CPUs can be given access to host
  /// memory only. Cost: 27 us (2 MiB) to 440 us (256 MiB) for the owner, about 20 ms a GiB for
  /// another GPU.
  virtual void set_access(address at, std::size_t bytes, std::span<const access_grant> grants) = 0;

  // --- sharing --------------------------------------------------------------------------------

  /// A new descriptor that stands for the memory; the caller closes it.
  virtual unique_fd export_fd(allocation_handle handle) = 0;
  /// A handle to the memory behind `fd`, from this or another process of this machine. The caller
  /// keeps the descriptor, and releases the handle. `request` is what the owner created: the
  /// driver does not tell it.
  virtual allocation_handle import_fd(int fd, const allocation_request& request) = 0;
  /// Throws unsupported unless info().fabric_sharing.
  virtual fabric_handle export_fabric(allocation_handle handle) = 0;
  virtual allocation_handle import_fabric(const fabric_handle& shared,
                                          const allocation_request& request) = 0;

  // --- page-locked host memory ----------------------------------------------------------------

  /// Page-locked host memory that the CPU and every device reach at this address, aligned to 4,096;
  /// what is in it is not said. Cost: about 670 ms a GiB (FACTS: 1.5 GiB/s). On CUDA it takes any
  /// context that is there, and makes one on device 0 where none is: create an event on the device
  /// that is meant before. Throws out_of_memory; invalid_argument for 0 bytes.
  virtual address allocate_pinned(std::size_t bytes) = 0;
  /// The caller has made sure that no stream uses it. CUDA may wait for running work. Throws
  /// invalid_argument for an address that allocate_pinned did not give, or that was freed.
  virtual void free_pinned(address at) = 0;
  /// Page-locks ordinary memory of the process for all devices. Pages that were not touched yet are
  /// made here, by one thread: touching them before is faster. The memory must stay mapped until
  /// unpin(). Throws invalid_argument when some of it is pinned already or is not memory of the
  /// process, out_of_memory beyond what may be locked.
  virtual void pin(address at, std::size_t bytes) = 0;
  /// Undoes the pin() of exactly this address; otherwise as free_pinned.
  virtual void unpin(address at) = 0;

  // --- streams and events ---------------------------------------------------------------------

  /// A stream that does not synchronise with the default stream.
  virtual native_stream create_stream(device_id device) = 0;
  /// Work already enqueued still runs.
  virtual void destroy_stream(native_stream stream) = 0;
  /// Blocks until all work enqueued so far is done. Rethrows what that work failed with.
  virtual void synchronize(native_stream stream) = 0;
  /// Whether all work enqueued so far is done.
  virtual bool idle(native_stream stream) = 0;
  /// An event without timing; not recorded counts as done.
  virtual native_event create_event(device_id device) = 0;
  virtual void destroy_event(native_event event) = 0;
  virtual void record(native_event event, native_stream stream) = 0;
  /// Whether the work before the latest record is done.
  virtual bool done(native_event event) = 0;
  virtual void synchronize(native_event event) = 0;
  /// Later work of `stream` waits for `event`, without blocking the caller.
  virtual void wait(native_stream stream, native_event event) = 0;

  // --- stream-ordered allocation --------------------------------------------------------------

  /// Memory of the device, aligned to 512, for work that is enqueued on `stream` from now on and
  /// for work that comes after it. It comes from the device's default pool (cuMemAllocAsync), which
  /// keeps what is freed until trim_async: the first call raises the pool's release threshold.
  /// Does not wait. Throws out_of_memory; invalid_argument for 0 bytes; unsupported where the
  /// device has no such pool and on a stream that is being captured.
  virtual address allocate_async(device_id device, std::size_t bytes, native_stream stream) = 0;
  /// Gives it back once the work enqueued on `stream` so far is done; any stream that comes after
  /// the last use will do. Does not wait. Throws invalid_argument for an address that
  /// allocate_async did not give or that was freed, unsupported on a stream that is being captured.
  virtual void free_async(address at, native_stream stream) = 0;
  /// Gives cached memory back to the device until the pool holds at most `keep_bytes`, or only what
  /// is in use. Memory freed by work that is not yet done stays.
  virtual void trim_async(device_id device, std::size_t keep_bytes) = 0;
  virtual async_memory async_usage(device_id device) const = 0;

  // --- work -----------------------------------------------------------------------------------

  /// Copies between any two mapped ranges, or ordinary host memory, in stream order.
  virtual void copy(address to, address from, std::size_t bytes, native_stream stream) = 0;
  /// Sets each byte.
  virtual void fill(address at, std::byte value, std::size_t bytes, native_stream stream) = 0;
  /// Stores a 64-bit word in stream order, after all earlier work of the stream is visible to every
  /// device and CPU that sees it. `at` is a multiple of 8: mapped memory, this device's, a peer's
  /// or the host's, or page-locked memory. Throws unsupported where the device has no such
  /// operation (CUDA: cuStreamWriteValue64; every device of compute capability 7.0 has it).
  virtual void store_word(address at, std::uint64_t value, native_stream stream) = 0;
  /// Later work of `stream` waits until the word at `at` is at least `least`, and then sees what
  /// was written before it was stored; otherwise as store_word. As CUDA compares
  /// (cuStreamWaitValue64): the difference, taken as signed, is not negative. Nothing ends the wait
  /// but a store: not a deadline, and destroying neither the stream nor the driver.
  virtual void wait_word(address at, std::uint64_t least, native_stream stream) = 0;
  /// Runs `function` on a host thread in stream order. It may not call the driver; on the host
  /// driver this is also how "kernels" run.
  virtual void launch(native_stream stream, std::function<void()> function) = 0;
  /// Whether the stream is being captured into a graph, and into which.
  virtual capture_info capture(native_stream stream) const = 0;
  /// The nodes that the next work captured on this stream would depend on directly; empty unless an
  /// active capture has work before it. Together with graph_dependencies this proves, inside a
  /// capture, that one stream's work comes after another's. Another thread that enqueues on a
  /// stream of the same capture meanwhile makes the answer stale.
  ///
  /// A graph_node means the same node as long as its capture is active, and on CUDA as long as its
  /// graph exists; it is never valid in another process. Ids of a graph that is gone may be used
  /// again by CUDA: compare nodes of one capture_info::id only.
  virtual std::vector<graph_node> capture_frontier(native_stream stream) const = 0;
  /// The nodes that `node` depends on directly. The host driver throws invalid_argument for a node
  /// of no active capture; CUDA need not notice.
  virtual std::vector<graph_node> graph_dependencies(graph_node node) const = 0;

 protected:
  driver() = default;
};

/// Whether a CUDA driver and at least one GPU are here. Loads libcuda on the first call.
/// `why_not`, when given, receives the reason.
bool cuda_available(std::string* why_not = nullptr);

/// The CUDA driver. Throws unsupported, saying what is missing, when there is none.
std::shared_ptr<driver> make_cuda_driver();

/// The driver that EVMM_DRIVER names (`cuda` or `host`), else CUDA when there is a GPU, else the
/// host driver with options from the environment. Throws invalid_argument for any other name.
std::shared_ptr<driver> make_driver();

/// The process's driver, made by make_driver() at the first call.
std::shared_ptr<driver> default_driver();
/// Replaces it; for tests and for programs that choose by themselves.
void set_default_driver(std::shared_ptr<driver> replacement);

}  // namespace evmm
