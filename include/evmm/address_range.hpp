// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>

namespace [[gnu::visibility("default")]] evmm {

/// A reserved range of virtual addresses, given back by the destructor.
///
/// Addresses: fixed from construction to destruction; touching an unmapped part is a fault.
/// Units: bytes, multiples of the granularity.
/// Threads: one thread at a time; reading base and size from any.
/// Streams: nothing here synchronises.
/// Errors: reserving throws invalid_argument or driver_error; the destructor logs.
class address_range {
 public:
  /// Reserves `bytes`. `alignment` is a power of two or 0; `hint` is a wish. `on` must outlive it.
  address_range(driver& on, std::size_t bytes, std::size_t alignment = 0, address hint = 0);

  address_range(address_range&& other) noexcept;
  address_range& operator=(address_range&& other) noexcept;
  address_range(const address_range&) = delete;
  address_range& operator=(const address_range&) = delete;
  ~address_range();

  address base() const noexcept { return base_; }
  std::size_t size() const noexcept { return size_; }
  bool contains(address at, std::size_t bytes = 1) const noexcept {
    return at >= base_ && bytes <= size_ && at - base_ <= size_ - bytes;
  }

 private:
  void reset() noexcept;

  driver* driver_ = nullptr;
  address base_ = 0;
  std::size_t size_ = 0;
};

}  // namespace evmm
