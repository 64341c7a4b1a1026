// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/pinned_blocks.hpp"

#include <evmm/allocator/options.hpp>
#include <evmm/driver.hpp>

#include <cstddef>
#include <memory>
#include <mutex>
#include <vector>

namespace evmm::pinned {

/// Takes page-locked memory and gives it back, on the NUMA node that the options ask for.
/// Thread-safe; holds no lock while memory is made.
class memory_source {
 public:
  memory_source(std::shared_ptr<driver> on, device_id device, const pinned_options& options);

  /// Throws out_of_memory and what the driver throws; then nothing was taken.
  segment take(std::size_t bytes);
  /// What throws has given nothing back.
  void give_back(const segment& which);

 private:
  /// The node of the next segment; nullopt to leave it to the kernel.
  std::optional<numa_node> next_node();
  std::vector<numa_node> choose() const;
  segment take_registered(std::size_t bytes, std::optional<numa_node> node);

  const std::shared_ptr<driver> on_;
  const device_id device_;
  const pinned_options options_;
  std::mutex mutex_;
  bool chosen_ = false;
  std::vector<numa_node> nodes_;
  std::size_t next_ = 0;
};

}  // namespace evmm::pinned
