// SPDX-License-Identifier: Apache-2.0
#include "lib/support/log.hpp"

#include <evmm/physical_memory.hpp>

#include <utility>

namespace evmm {

physical_memory::physical_memory(driver& on, const allocation_request& request)
    : driver_(&on), handle_(on.create(request)), request_(request) {}

physical_memory physical_memory::import_fd(driver& on, int fd, const allocation_request& request) {
  return {on, on.import_fd(fd, request), request};
}

physical_memory physical_memory::import_fabric(driver& on, const fabric_handle& shared,
                                               const allocation_request& request) {
  return {on, on.import_fabric(shared, request), request};
}

physical_memory::physical_memory(physical_memory&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)),
      handle_(std::exchange(other.handle_, {})),
      request_(other.request_),
      owned_(other.owned_) {}

physical_memory& physical_memory::operator=(physical_memory&& other) noexcept {
  if (this != &other) {
    reset();
    driver_ = std::exchange(other.driver_, nullptr);
    handle_ = std::exchange(other.handle_, {});
    request_ = other.request_;
    owned_ = other.owned_;
  }
  return *this;
}

physical_memory::~physical_memory() {
  reset();
}

void physical_memory::reset() noexcept {
  if (driver_ == nullptr) return;
  log_failure("releasing physical memory", [this] { driver_->release(handle_); });
  driver_ = nullptr;
}

}  // namespace evmm
