// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>

namespace [[gnu::visibility("default")]] evmm {

/// One handle to physical memory, released by the destructor.
///
/// Addresses: none of its own; see `mapping`. Memory that is mapped lives on after its handle.
/// Units: bytes, multiples of the location's granularity.
/// Threads: one thread at a time.
/// Streams: nothing here synchronises. Releasing memory that a stream still reads through a
///   mapping is safe; unmapping is what must wait.
/// Errors: creating and importing throw as driver::create does; the destructor logs.
class physical_memory {
 public:
  /// Creates `request.bytes` at `request.where`. `on` must outlive the object.
  physical_memory(driver& on, const allocation_request& request);
  /// Imports what another process exported; `request` describes what the owner created.
  static physical_memory import_fd(driver& on, int fd, const allocation_request& request);
  static physical_memory import_fabric(driver& on, const fabric_handle& shared,
                                       const allocation_request& request);

  physical_memory(physical_memory&& other) noexcept;
  physical_memory& operator=(physical_memory&& other) noexcept;
  physical_memory(const physical_memory&) = delete;
  physical_memory& operator=(const physical_memory&) = delete;
  ~physical_memory();

  std::size_t size() const noexcept { return request_.bytes; }
  memory_location location() const noexcept { return request_.where; }
  allocation_handle handle() const noexcept { return handle_; }
  /// Whether this process created it, rather than imported it.
  bool owned() const noexcept { return owned_; }
  /// What it was created from.
  const allocation_request& request() const noexcept { return request_; }

  unique_fd export_fd() const { return driver_->export_fd(handle_); }
  fabric_handle export_fabric() const { return driver_->export_fabric(handle_); }

 private:
  physical_memory(driver& on, allocation_handle handle, const allocation_request& request)
      : driver_(&on), handle_(handle), request_(request), owned_(false) {}
  void reset() noexcept;

  driver* driver_ = nullptr;
  allocation_handle handle_{};
  allocation_request request_;
  bool owned_ = true;
};

}  // namespace evmm
