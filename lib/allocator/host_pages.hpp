// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>
#include <memory>
#include <optional>

// Ordinary pages of the process, and the NUMA node they come from: what the pinned allocator asks
// of the operating system.
namespace evmm::pinned {

/// Pages that are made when they are touched. Throws out_of_memory.
address map_pages(std::size_t bytes);
void unmap_pages(address at, std::size_t bytes) noexcept;
/// Pages of the range that are touched from now on come from the node: only from there when
/// `strict`, else as long as it has some. Where the kernel refuses, that is logged.
void bind_pages(address at, std::size_t bytes, numa_node node, bool strict) noexcept;
/// Makes all pages, by up to `threads` threads side by side.
void touch_pages(address at, std::size_t bytes, unsigned threads);

/// The same for all memory that the calling thread makes in a scope, also inside the kernel.
class memory_policy {
 public:
  memory_policy(std::optional<numa_node> node, bool strict);
  memory_policy(const memory_policy&) = delete;
  memory_policy& operator=(const memory_policy&) = delete;
  ~memory_policy();

 private:
  struct saved;
  std::unique_ptr<saved> before_;
};

}  // namespace evmm::pinned
