// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_choice.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/patterns.hpp"

#include <evmm/address_range.hpp>
#include <evmm/driver.hpp>
#include <evmm/error.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <memory>
#include <optional>
#include <string>
#include <vector>

// What a driver promises, in driver_{memory,pool,stream,word,capture}_contract.hpp: written against
// `driver` alone, instantiated for the host driver in tests/unit and for CUDA in tests/gpu.
// The CPU never touches device memory here; host memory it touches where access was granted.

namespace evmm::test {

using namespace evmm::units;

/// A driver, its first device, and a NUMA node that serves it.
class driver_contract : public ::testing::TestWithParam<driver_choice> {
 protected:
  void SetUp() override {
    std::string why_not;
    on = GetParam().make(&why_not);
    if (!on) GTEST_SKIP() << why_not;
    granule = on->granularity(device);
    tiers = {device};
    if (const auto node = working_node()) {
      host = memory_location::on(*node);
      tiers.push_back(host);
    }
  }

  std::vector<access_grant> access_for(memory_location where) const {
    std::vector<access_grant> grants{{device}};
    if (where.kind == tier::host) grants.push_back({where});
    return grants;
  }

  /// Reserved, created, mapped and accessible memory, in `count` handles one behind the other.
  struct backed {
    address_range range;
    std::vector<physical_memory> handles;
    std::vector<mapping> mappings;
    address base() const { return range.base(); }
  };
  backed make(memory_location where, std::size_t bytes, std::size_t count = 1) {
    backed made{address_range(*on, bytes * count), {}, {}};
    for (std::size_t i = 0; i < count; ++i) {
      made.handles.emplace_back(*on, allocation_request{.bytes = bytes, .where = where});
      made.mappings.emplace_back(*on, made.base() + i * bytes, made.handles.back(),
                                 access_for(where));
    }
    return made;
  }

  /// The bytes at `at`, fetched by the driver.
  std::vector<std::byte> read(address at, std::size_t bytes) {
    std::vector<std::byte> found(bytes);
    on->copy(reinterpret_cast<address>(found.data()), at, bytes, nullptr);
    on->synchronize(native_stream{nullptr});
    return found;
  }

  std::shared_ptr<driver> on;
  const memory_location device = memory_location::on(device_id{0});
  memory_location host{tier::host, -1};
  std::vector<memory_location> tiers;  ///< those that work here
  std::size_t granule = 0;

 private:
  std::optional<numa_node> working_node() {
    for (const auto node : on->numa_nodes()) {
      const auto where = memory_location::on(node);
      try {
        on->release(on->create({.bytes = on->granularity(where), .where = where}));
        return node;
      } catch (const error&) {
      }
    }
    return std::nullopt;
  }
};

/// A stream of device 0 for as long as the scope.
class scoped_stream {
 public:
  explicit scoped_stream(driver& on) : on_(on), stream_(on.create_stream(device_id{0})) {}
  scoped_stream(const scoped_stream&) = delete;
  scoped_stream& operator=(const scoped_stream&) = delete;
  ~scoped_stream() { on_.destroy_stream(stream_); }
  operator native_stream() const { return stream_; }  // NOLINT: stands for it

 private:
  driver& on_;
  native_stream stream_;
};

/// The same for an event.
class scoped_event {
 public:
  explicit scoped_event(driver& on) : on_(on), event_(on.create_event(device_id{0})) {}
  scoped_event(const scoped_event&) = delete;
  scoped_event& operator=(const scoped_event&) = delete;
  ~scoped_event() { on_.destroy_event(event_); }
  operator native_event() const { return event_; }  // NOLINT: stands for it

 private:
  driver& on_;
  native_event event_;
};

}  // namespace evmm::test
