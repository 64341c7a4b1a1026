// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/host/memory_table.hpp"
#include "lib/driver/host/worker.hpp"

#include <evmm/driver.hpp>

#include <cstddef>
#include <functional>
#include <map>
#include <memory>
#include <mutex>

namespace evmm::host {

/// The stream-ordered allocator of one device. What is freed stays until trimmed; the stream that
/// freed it may have it again at once, any other when the work before the free is done. Blocks are
/// not split or merged. Thread-safe.
class async_pool {
 public:
  /// `memory` keeps the device's capacity, and outlives the pool.
  async_pool(memory_table& memory, device_id device);
  async_pool(const async_pool&) = delete;
  async_pool& operator=(const async_pool&) = delete;
  ~async_pool();

  address allocate(std::size_t bytes, native_stream stream);
  /// `mark` puts a completion behind the work of `stream`; what it throws leaves all as it was.
  /// False when `at` is not allocated here.
  bool free(address at, native_stream stream,
            const std::function<std::shared_ptr<completion>()>& mark);
  void trim(std::size_t keep_bytes);
  async_memory usage() const;

 private:
  struct block {
    std::size_t bytes = 0;
    bool allocated = true;
    native_stream freed_on = nullptr;
    std::shared_ptr<completion> past = nullptr;  ///< of the free
    bool used() const { return allocated || !past->reached(); }
  };
  /// The smallest free block that serves without much waste, or end.
  std::map<address, block>::iterator fitting(std::size_t bytes, native_stream stream);
  void trim_locked(std::size_t keep_bytes) noexcept;
  std::size_t used_bytes() const;

  memory_table& memory_;
  const memory_location where_;
  mutable std::mutex mutex_;
  std::map<address, block> blocks_;
  async_memory totals_;  ///< but for used_bytes, which is counted when asked
};

}  // namespace evmm::host
