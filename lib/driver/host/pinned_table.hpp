// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/host/memory_table.hpp"

#include <evmm/driver.hpp>

#include <cstddef>
#include <map>
#include <mutex>
#include <optional>
#include <string_view>
#include <vector>

namespace evmm::host {

/// Page-locked host memory. Nothing is locked: pages count against the capacity of the first NUMA
/// node that has room, and are ordinary ones. Thread-safe.
class pinned_table {
 public:
  /// `memory` keeps the capacities, and outlives the table.
  pinned_table(memory_table& memory, std::vector<numa_node> nodes);
  pinned_table(const pinned_table&) = delete;
  pinned_table& operator=(const pinned_table&) = delete;
  ~pinned_table();

  address allocate(std::size_t bytes);
  void free(address at);
  void pin(address at, std::size_t bytes);
  void unpin(address at);

 private:
  struct entry {
    std::size_t bytes = 0;  ///< whole pages
    bool ours = false;      ///< from allocate
    std::optional<numa_node> payer = std::nullopt;
  };
  using table = std::map<address, entry>;

  /// Counts the pages at a node; throws out_of_memory.
  std::optional<numa_node> pay(std::size_t bytes, std::string_view doing);
  void give_back(const entry& which) noexcept;
  table::iterator find(address at, bool ours, std::string_view doing);

  memory_table& memory_;
  const std::vector<numa_node> nodes_;
  std::mutex mutex_;
  table entries_;
};

}  // namespace evmm::host
