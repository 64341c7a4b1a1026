// SPDX-License-Identifier: Apache-2.0
#include "lib/memory/copier.hpp"

#include "lib/memory/device_scope.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <utility>

namespace evmm {

namespace {

/// Waiting for a stream that is being captured would end its capture, and an event that is recorded
/// there is never over.
void check_no_capture(driver& on, std::span<const native_stream> streams) {
  for (const native_stream stream : streams) {
    if (on.capture(stream).status == capture_status::none) continue;
    throw invalid_argument("a region cannot wait for a stream that is being captured",
                           "change the region before the capture, or after it");
  }
}

}  // namespace

void wait_for(driver& on, device_id device, const uses& in_use) {
  const device_scope current(on, device);
  check_no_capture(on, in_use.streams);
  for (const native_stream stream : in_use.streams) on.synchronize(stream);
  for (const native_event event : in_use.events) on.synchronize(event);
}

scoped_event::scoped_event(scoped_event&& other) noexcept
    : driver_(std::exchange(other.driver_, nullptr)), event_(other.event_) {}

scoped_event& scoped_event::operator=(scoped_event&& other) noexcept {
  if (this != &other) {
    reset();
    driver_ = std::exchange(other.driver_, nullptr);
    event_ = other.event_;
  }
  return *this;
}

scoped_event::~scoped_event() {
  reset();
}

void scoped_event::reset() noexcept {
  if (driver_ == nullptr) return;
  log_failure("destroying an event", [this] { driver_->destroy_event(event_); });
  driver_ = nullptr;
}

copier::~copier() {
  if (!stream_) return;
  log_failure("destroying a region's stream", [this] { driver_.destroy_stream(*stream_); });
}

native_stream copier::stream() {
  if (!stream_) stream_ = driver_.create_stream(device_);
  return *stream_;
}

void copier::copy(address to, address from, std::size_t bytes) {
  driver_.copy(to, from, bytes, stream());
  try {
    driver_.synchronize(stream());
  } catch (...) {
    settle();
    throw;
  }
  bytes_copied_ += bytes;
}

void copier::settle() noexcept {
  if (!stream_) return;
  insist("waiting for a copy", [this] { driver_.synchronize(*stream_); });
}

scoped_event copier::behind(native_stream used) {
  for (std::size_t i = 0;; ++i) {
    scoped_event reached(driver_, i == 0 ? device_ : peers_[i - 1]);
    try {
      driver_.record(reached.get(), used);
      return reached;
    } catch (const invalid_argument&) {
      if (i == peers_.size()) throw;
    }
  }
}

void copier::follow(const uses& in_use) {
  const device_scope current(driver_, device_);  // whose default stream is meant
  check_no_capture(driver_, in_use.streams);
  for (const native_stream used : in_use.streams) {
    driver_.wait(stream(), behind(used).get());
  }
  for (const native_event used : in_use.events) driver_.wait(stream(), used);
  if (in_use.events.empty() || driver_.capture(stream()).status == capture_status::none) return;
  // No driver tells of an event that it is recorded in a capture; its waiter becomes part of that.
  const native_stream drawn = *std::exchange(stream_, std::nullopt);
  log_failure("destroying a captured stream", [&] { driver_.destroy_stream(drawn); });
  throw invalid_argument("a region cannot wait for an event that is recorded in a capture",
                         "change the region before the capture, or after it");
}

scoped_event copier::copy_after(address to, address from, std::size_t bytes, const uses& in_use) {
  scoped_event copied(driver_, device_);
  follow(in_use);
  driver_.copy(to, from, bytes, stream());
  try {
    driver_.record(copied.get(), stream());
  } catch (...) {
    settle();
    throw;
  }
  bytes_copied_ += bytes;
  return copied;
}

scoped_event copier::after(const uses& in_use) {
  scoped_event reached(driver_, device_);
  follow(in_use);
  driver_.record(reached.get(), stream());
  return reached;
}

}  // namespace evmm
