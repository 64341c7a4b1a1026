// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/physical_memory.hpp>

#include <cstddef>
#include <span>

namespace [[gnu::visibility("default")]] evmm {

/// One handle mapped, whole, at an address; unmapped by the destructor.
///
/// Addresses: fixed while it lives. It keeps the memory alive, not the reserved range.
/// Units: bytes; the size is the handle's.
/// Threads: one thread at a time.
/// Streams: neither constructor nor destructor waits. Whoever destroys it has made sure that no
///   stream uses the range any more.
/// Errors: the constructor leaves nothing mapped when it throws; the destructor logs.
class mapping {
 public:
  /// Maps `memory` at `at`, inside a reserved range, and grants access. `on` must outlive it.
  mapping(driver& on, address at, const physical_memory& memory,
          std::span<const access_grant> access);

  mapping(mapping&& other) noexcept;
  mapping& operator=(mapping&& other) noexcept;
  mapping(const mapping&) = delete;
  mapping& operator=(const mapping&) = delete;
  ~mapping();

  address base() const noexcept { return base_; }
  std::size_t size() const noexcept { return size_; }

  /// Unmaps now and reports what the destructor could only log. On an error it stays mapped.
  void unmap();

 private:
  void reset() noexcept;

  driver* driver_ = nullptr;
  address base_ = 0;
  std::size_t size_ = 0;
};

}  // namespace evmm
