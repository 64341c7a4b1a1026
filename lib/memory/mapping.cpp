// SPDX-License-Identifier: Apache-2.0
#include "lib/support/log.hpp"

#include <evmm/mapping.hpp>

#include <utility>

namespace evmm {

mapping::mapping(driver& on, address at, const physical_memory& memory,
                 std::span<const access_grant> access)
    : base_(at), size_(memory.size()) {
  on.map(at, size_, memory.handle());
  driver_ = &on;
  try {
    on.set_access(at, size_, access);
  } catch (...) {
    reset();
    throw;
  }
}

mapping::mapping(mapping&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)),
      base_(std::exchange(other.base_, 0)),
      size_(std::exchange(other.size_, 0)) {}

mapping& mapping::operator=(mapping&& other) noexcept {
  if (this != &other) {
    reset();
    driver_ = std::exchange(other.driver_, nullptr);
    base_ = std::exchange(other.base_, 0);
    size_ = std::exchange(other.size_, 0);
  }
  return *this;
}

mapping::~mapping() {
  reset();
}

void mapping::unmap() {
  if (driver_ == nullptr) return;
  driver_->unmap(base_, size_);
  driver_ = nullptr;
}

void mapping::reset() noexcept {
  insist("unmapping", [this] { unmap(); });
  driver_ = nullptr;
}

}  // namespace evmm
