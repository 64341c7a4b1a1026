// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/elastic_region.hpp>

#include <cstddef>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

namespace evmm {

/// How much ncclMemAlloc may take; from the environment.
struct ncclmem_options {
  /// Of each device, by all allocations together; what is asked beyond goes to the host tier.
  std::optional<std::size_t> device_limit;
  /// Of host memory for each device. 0: there is no host tail.
  std::size_t host_tail = 0;

  /// EVMM_NCCLMEM_DEVICE_LIMIT and EVMM_NCCLMEM_HOST_TAIL ("64G"). Throws invalid_argument naming
  /// the variable.
  static ncclmem_options from_environment();
};

/// Memory as ncclMemAlloc gives it: of a device, readable by every GPU here that can reach it, in
/// handles that may leave the process. Beyond the device's share it ends in a host tail: one handle
/// in each tier, behind one range of addresses.
///
/// Units: bytes, rounded up to the granularity. Threads: any, at any time.
/// Streams: free() waits for none, as NCCL's does; the caller has made sure that none uses it.
/// Errors: out_of_memory, which says what the two limits leave; nothing is taken then.
class ncclmem_pool {
 public:
  ncclmem_pool(std::shared_ptr<driver> on, const ncclmem_options& options);

  /// On the calling thread's device.
  address allocate(std::size_t bytes);
  /// False for an address that allocate() did not give, or that was freed.
  bool free(address at);

 private:
  /// What allocations hold of one device and of host memory for it.
  struct account {
    std::size_t device_bytes = 0, host_bytes = 0;
  };
  struct split {
    std::size_t device_bytes, host_bytes;
  };
  struct block {
    device_id device;
    split held;
    elastic_region region;
  };
  split divide(device_id device, std::size_t bytes) const;
  elastic_region make(device_id device, const split& parts) const;
  /// Those that can reach a device's memory, without itself.
  std::vector<device_id> peers_of(device_id device) const;

  std::shared_ptr<driver> on_;
  ncclmem_options options_;
  std::mutex mutex_;
  std::vector<account> accounts_;  ///< by device
  std::map<address, block> blocks_;
};

}  // namespace evmm
