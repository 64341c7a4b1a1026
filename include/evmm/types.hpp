// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <compare>
#include <cstdint>
#include <string>

// The CUDA driver's own stream and event types, so that a user's cudaStream_t is passed as it is.
// The host driver gives out pointers of the same types.
struct CUstream_st;
struct CUevent_st;

namespace [[gnu::visibility("default")]] evmm {

/// An integer that does not mix with others of its kind: a device is not a node is not a rank.
template <class Tag>
struct strong_id {
  int value = 0;
  friend constexpr auto operator<=>(const strong_id&, const strong_id&) = default;
};

/// Ordinal of a device as the driver counts them (after CUDA_VISIBLE_DEVICES).
using device_id = strong_id<struct device_id_tag>;
/// The operating system's number of a NUMA node.
using numa_node = strong_id<struct numa_node_tag>;
/// A rank of the job, 0 to size - 1.
using rank_id = strong_id<struct rank_id_tag>;

/// A virtual address; 0 is no address.
using address = std::uintptr_t;
/// A CUDA stream, or a stream of the host driver. Null is the legacy default stream: of the
/// calling thread's device for a driver, of its own device for an allocator or a heap.
using native_stream = ::CUstream_st*;
/// A CUDA event, or an event of the host driver.
using native_event = ::CUevent_st*;

/// Which kind of memory backs a segment.
enum class tier : std::uint8_t {
  device,  ///< memory of a GPU (CUDA's DEVICE)
  host,    ///< page-locked memory of one NUMA node (CUDA's HOST_NUMA)
};

/// Where physical memory lies: a device, or a NUMA node of the host.
struct memory_location {
  tier kind = tier::device;
  int index = 0;  ///< device ordinal, or NUMA node number

  static constexpr memory_location on(device_id device) { return {tier::device, device.value}; }
  static constexpr memory_location on(numa_node node) { return {tier::host, node.value}; }
  friend constexpr auto operator<=>(const memory_location&, const memory_location&) = default;
};

/// "DEVICE" or "HOST_NUMA".
std::string to_string(tier kind);
/// "DEVICE 0" or "HOST_NUMA 1".
std::string to_string(memory_location where);

}  // namespace evmm
