// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/fault_driver.hpp"

#include <evmm/allocator/pinned_host_allocator.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <memory>

namespace evmm::test {

using namespace evmm::units;

inline address at(const void* pointer) {
  return reinterpret_cast<address>(pointer);
}

/// A pinned allocator on a driver that can be made to fail, and nothing of it left behind.
class pinned_allocator : public ::testing::Test {
 protected:
  std::unique_ptr<pinned_host_allocator> make(const pinned_options& options = {}) {
    return std::make_unique<pinned_host_allocator>(on, device_id{0}, options);
  }
  alive_counts alive() const {
    auto counts = on->alive();
    counts.descriptors = 0;
    return counts;
  }

  const std::shared_ptr<host_driver> host =
      host_driver::make({.devices = 2, .device_bytes = 64_MiB, .host_bytes = 64_MiB});
  const std::shared_ptr<fault_driver> on = fault_driver::make(host);
};

}  // namespace evmm::test
