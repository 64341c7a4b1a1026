// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/driver_choice.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/patterns.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

// What caching_allocator promises, on any driver, in allocator_*_contract.hpp: instantiated for
// the host driver in tests/unit and for CUDA in tests/gpu. A device of CUDA is large, so tests that
// exhaust memory limit themselves (allow). The CPU never touches device memory, and no launched
// function is waited for while a gate is closed.

namespace evmm::test {

using namespace evmm::units;

inline constexpr const char* k_segments = "expandable_segments:False";

/// A driver, and at most one allocator on it at a time. Afterwards its books must agree with
/// themselves and nothing may be left in the driver.
class allocator_contract : public ::testing::TestWithParam<driver_choice> {
 protected:
  void SetUp() override {
    std::string why_not;
    const auto inner = GetParam().make(&why_not);
    if (!inner) GTEST_SKIP() << why_not;
    on = fault_driver::make(inner);
    before_ = on->alive();
  }

  void TearDown() override {
    if (!on) return;
    if (allocator) {
      EXPECT_NO_THROW(allocator->check_invariants());
    }
    allocator.reset();
    for (native_stream each : streams_) on->destroy_stream(each);
    alive_counts after = on->alive();
    after.descriptors = before_.descriptors;  // CUDA opens some when it likes
    EXPECT_EQ(after, before_);
  }

  caching_allocator& make(std::string_view config = "") { return make(parse_options(config)); }
  caching_allocator& make(const allocator_options& options) {
    allocator.reset();
    return allocator.emplace(on, device_id{0}, options);
  }
  native_stream new_stream() {
    streams_.push_back(on->create_stream(device_id{0}));
    return streams_.back();
  }
  /// Lets the allocator hold this much of the device, and no more.
  void allow(std::size_t bytes) {
    const auto total = on->usage(memory_location::on(device_id{0})).total_bytes;
    allocator->set_memory_fraction(static_cast<double>(bytes + 512_KiB) /
                                   static_cast<double>(total));
  }

  std::vector<void*> allocate(std::size_t count, std::size_t bytes,
                              native_stream stream = nullptr) {
    std::vector<void*> made;
    for (std::size_t i = 0; i < count; ++i) made.push_back(allocator->allocate(bytes, stream));
    return made;
  }
  void free(const std::vector<void*>& all) {
    for (void* each : all) allocator->free(each);
  }
  std::size_t block_bytes(const void* at) const {
    return allocator->base_allocation(at).block_bytes;
  }
  std::int64_t reserved() const { return allocator->statistics().reserved_bytes.all.current; }
  static address at(const void* pointer) { return reinterpret_cast<address>(pointer); }
  void write(const void* to, std::size_t bytes, std::uint64_t seed) {
    write_pattern(*on, at(to), bytes, seed);
  }
  bool holds(const void* from, std::size_t bytes, std::uint64_t seed) {
    return holds_pattern(*on, at(from), bytes, seed);
  }
  /// What an invalid_argument says, or an out_of_memory with its help; "done" when none came.
  static std::string refusal(const std::function<void()>& call) {
    try {
      call();
    } catch (const error& refused) {
      if (refused.category() == error_category::invalid_argument ||
          refused.category() == error_category::out_of_memory) {
        return refused.what();
      }
      throw;
    }
    return "done";
  }
  static bool says(const std::string& text, std::string_view part) {
    return text.find(part) != std::string::npos;
  }

  std::shared_ptr<fault_driver> on;
  std::optional<caching_allocator> allocator;

 private:
  alive_counts before_;
  std::vector<native_stream> streams_;
};

}  // namespace evmm::test
