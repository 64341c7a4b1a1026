// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/memory/memory_source.hpp"
#include "lib/memory/remap.hpp"

#include <evmm/address_range.hpp>
#include <evmm/driver.hpp>
#include <evmm/mapping.hpp>
#include <evmm/region.hpp>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Blocks until the work enqueued so far on what `in_use` names is done. The default stream is the
/// device's.
void wait_for(driver& on, device_id device, const uses& in_use);

/// Memory mapped at addresses of its own for as long as it takes to copy from or to it.
class scratch_mapping {
 public:
  scratch_mapping(driver& on, const physical_memory& memory, const access_rule& access)
      : range_(on, memory.size()), mapped_(on, range_.base(), memory, access(memory.location())) {}
  address base() const noexcept { return range_.base(); }

 private:
  address_range range_;
  mapping mapped_;  ///< after the range: unmapped before it is given back
};

/// An event that is destroyed when it is no longer needed.
class scoped_event {
 public:
  scoped_event(driver& on, device_id device) : driver_(&on), event_(on.create_event(device)) {}
  scoped_event(scoped_event&& other) noexcept;
  scoped_event& operator=(scoped_event&& other) noexcept;
  ~scoped_event();
  native_event get() const noexcept { return event_; }

 private:
  void reset() noexcept;
  driver* driver_;
  native_event event_;
};

/// A region's own stream, on which contents move between tiers. Made at the first use.
class copier {
 public:
  /// Streams that it follows are the device's or those of `peers`.
  copier(driver& on, device_id device, std::vector<device_id> peers = {})
      : driver_(on), device_(device), peers_(std::move(peers)) {}
  copier(const copier&) = delete;
  copier& operator=(const copier&) = delete;
  ~copier();

  /// Copies and blocks until it is done.
  void copy(address to, address from, std::size_t bytes);
  /// Copies behind `in_use`; the event is done when the copy is.
  scoped_event copy_after(address to, address from, std::size_t bytes, const uses& in_use);
  /// Waits for the copies under way, whose memory is about to go. Tries twice: a wait that failed
  /// has not told that they are over.
  void settle() noexcept;
  /// An event behind all that `in_use` names, without work of its own.
  scoped_event after(const uses& in_use);

  std::uint64_t bytes_copied() const noexcept { return bytes_copied_; }

 private:
  native_stream stream();
  /// An event behind what is enqueued on `used`. It must be of the stream's device, which a driver
  /// does not tell: a refused record means another one.
  scoped_event behind(native_stream used);
  void follow(const uses& in_use);

  driver& driver_;
  device_id device_;
  std::vector<device_id> peers_;
  std::optional<native_stream> stream_;
  std::uint64_t bytes_copied_ = 0;
};

}  // namespace evmm
