// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/forwarding_driver.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>

namespace evmm::test {

/// Sees to it that the default stream is never that of another device than the one that is meant.
class one_default_stream final : public forwarding_driver {
 public:
  one_default_stream(std::shared_ptr<driver> inner, device_id meant)
      : forwarding_driver(std::move(inner)), meant_(meant) {}
  bool idle(native_stream stream) override {
    check(stream);
    return forwarding_driver::idle(stream);
  }
  void synchronize(native_stream stream) override {
    check(stream);
    forwarding_driver::synchronize(stream);
  }
  using forwarding_driver::synchronize;
  void record(native_event event, native_stream stream) override {
    check(stream);
    forwarding_driver::record(event, stream);
  }
  void wait(native_stream stream, native_event event) override {
    check(stream);
    forwarding_driver::wait(stream, event);
  }
  void copy(address to, address from, std::size_t bytes, native_stream stream) override {
    check(stream);
    forwarding_driver::copy(to, from, bytes, stream);
  }
  void store_word(address at, std::uint64_t value, native_stream stream) override {
    check(stream);
    forwarding_driver::store_word(at, value, stream);
  }
  void wait_word(address at, std::uint64_t least, native_stream stream) override {
    check(stream);
    forwarding_driver::wait_word(at, least, stream);
  }
  capture_info capture(native_stream stream) const override {
    check(stream);
    return forwarding_driver::capture(stream);
  }
  /// How often it was used.
  int uses() const { return uses_; }

 private:
  void check(native_stream stream) const {
    if (stream != nullptr) return;
    ++uses_;
    EXPECT_EQ(current_device(), meant_);
  }
  device_id meant_;
  mutable std::atomic<int> uses_ = 0;
};

}  // namespace evmm::test
