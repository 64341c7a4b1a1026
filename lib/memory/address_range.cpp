// SPDX-License-Identifier: Apache-2.0
#include "lib/support/log.hpp"

#include <evmm/address_range.hpp>

#include <utility>

namespace evmm {

address_range::address_range(driver& on, std::size_t bytes, std::size_t alignment, address hint)
    : driver_(&on), base_(on.reserve(bytes, alignment, hint)), size_(bytes) {}

address_range::address_range(address_range&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)),
      base_(std::exchange(other.base_, 0)),
      size_(std::exchange(other.size_, 0)) {}

address_range& address_range::operator=(address_range&& other) noexcept {
  if (this != &other) {
    reset();
    driver_ = std::exchange(other.driver_, nullptr);
    base_ = std::exchange(other.base_, 0);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

address_range::~address_range() {
  reset();
}

void address_range::reset() noexcept {
  if (driver_ == nullptr) return;
  log_failure("giving an address range back", [this] { driver_->free(base_, size_); });
  driver_ = nullptr;
}

}  // namespace evmm
