// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// The machine that a host driver pretends to be.
struct host_driver_options {
  int devices = 1;
  /// Capacity of each device. Memory is taken from the system only when it is touched, so this may
  /// exceed what the machine has.
  std::size_t device_bytes = std::size_t{1} << 30;
  /// Capacity of each NUMA node.
  std::size_t host_bytes = std::size_t{1} << 36;
  /// Node numbers to offer. Where such a node really exists, its memory is bound to it.
  std::vector<int> numa_nodes = {0};
  /// Offer fabric handles too. They work between processes of one user on one machine.
  bool fabric = false;

  /// Defaults, replaced by EVMM_HOST_DEVICES, EVMM_HOST_DEVICE_BYTES, EVMM_HOST_BYTES (bytes, or
  /// with K, M, G, T), EVMM_HOST_NUMA_NODES (comma-separated) and EVMM_HOST_FABRIC (0 or 1).
  /// Throws invalid_argument naming a variable whose value cannot be read.
  static host_driver_options from_environment();
};

/// A graph captured from a host driver's streams; launched with host_driver::launch_graph.
struct host_graph;

/// The driver without a GPU. Device and host memory are memfd pages mapped into reserved ranges,
/// shared by descriptor like the real thing; streams are worker threads that run in order. What
/// the CUDA driver refuses, this one refuses with the same error, so that a test that passes here
/// says something about there. It also refuses some misuse that CUDA lets pass, such as unmapping
/// what is not mapped.
///
/// Differences that remain: the CPU may touch device memory that is mapped with any access (host
/// functions play the kernels); capacity is counted by process, not by machine; times mean nothing.
/// Each handle holds a file descriptor, so a driver raises the process's soft limit of open files
/// to the hard one.
class host_driver : public driver {
 public:
  static std::shared_ptr<host_driver> make(
      const host_driver_options& options = host_driver_options::from_environment());

  /// Work enqueued on `stream` from now on is recorded instead of run, and so is work on streams
  /// that wait for an event recorded in the capture. Throws invalid_argument if one is active.
  virtual void begin_capture(native_stream stream) = 0;
  /// Ends the capture begun on `stream`. Throws invalid_argument when there is none, when it was
  /// invalidated, or when another stream was not joined back.
  virtual std::shared_ptr<const host_graph> end_capture(native_stream stream) = 0;
  /// Runs a captured graph in stream order; any number of times.
  virtual void launch_graph(const std::shared_ptr<const host_graph>& graph,
                            native_stream stream) = 0;
};

}  // namespace evmm
