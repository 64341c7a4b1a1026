// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"

#include <evmm/address_range.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <type_traits>
#include <utility>
#include <vector>

// physical_memory, address_range and mapping: what is made is undone, in every order and after
// every failure.

namespace evmm::test {
namespace {

using namespace evmm::units;

class vmm_objects : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(on->alive(), at_first); }

  const std::shared_ptr<fault_driver> on =
      fault_driver::make(host_driver::make({.device_bytes = 64_MiB, .fabric = true}));
  const alive_counts at_first = on->alive();
  const allocation_request request{.bytes = 4_MiB, .where = {tier::device, 0}};
  const std::array<access_grant, 1> grants{access_grant{{tier::device, 0}}};
};

template <class Type>
constexpr bool moves_only =
    std::is_nothrow_move_constructible_v<Type>&& std::is_nothrow_move_assignable_v<Type> &&
    !std::is_copy_constructible_v<Type> && !std::is_copy_assignable_v<Type>;
static_assert(moves_only<physical_memory> && moves_only<address_range> && moves_only<mapping>);

TEST_F(vmm_objects, undo_what_they_did) {
  {
    const address_range range(*on, 16_MiB, 8_MiB);
    const physical_memory memory(*on, request);
    const mapping mapped(*on, range.base() + 8_MiB, memory, grants);
    EXPECT_EQ(range.size(), 16_MiB);
    EXPECT_EQ(range.base() % 8_MiB, 0u);
    EXPECT_EQ(memory.size(), 4_MiB);
    EXPECT_EQ(memory.location(), request.where);
    EXPECT_TRUE(memory.owned());
    EXPECT_EQ(mapped.base(), range.base() + 8_MiB);
    EXPECT_EQ(mapped.size(), 4_MiB);
    EXPECT_EQ(on->alive().mapped_bytes, 4_MiB);
    *reinterpret_cast<char*>(mapped.base()) = 1;
    on->clear_record();
  }
  EXPECT_EQ(on->record_of_calls(),
            (std::vector{driver_call::unmap, driver_call::release, driver_call::free}));
}

TEST_F(vmm_objects, change_hands_without_a_call) {
  address_range range(*on, 16_MiB);
  physical_memory memory(*on, request);
  mapping mapped(*on, range.base(), memory, grants);
  on->clear_record();
  address_range moved_range(std::move(range));
  physical_memory moved_memory(std::move(memory));
  mapping moved_mapping(std::move(mapped));
  EXPECT_TRUE(on->record_of_calls().empty());
  EXPECT_EQ(moved_mapping.base(), moved_range.base());
  *reinterpret_cast<char*>(moved_mapping.base()) = 1;

  auto* const itself = &moved_mapping;
  moved_mapping = std::move(*itself);
  EXPECT_TRUE(on->record_of_calls().empty());
}

TEST_F(vmm_objects, give_up_what_they_had_when_assigned) {
  const address_range range(*on, 16_MiB);
  address_range other(*on, 2_MiB);
  physical_memory memory(*on, request);
  mapping mapped(*on, range.base(), memory, grants);
  mapped = mapping(*on, range.base() + 8_MiB, memory, grants);
  EXPECT_EQ(mapped.base(), range.base() + 8_MiB);
  EXPECT_EQ(on->alive().mappings, 1u);
  memory = physical_memory(*on, {.bytes = 2_MiB, .where = request.where});
  EXPECT_EQ(memory.size(), 2_MiB);
  EXPECT_EQ(on->alive().created_bytes, 2_MiB);
  other = address_range(*on, 4_MiB);
  EXPECT_EQ(on->alive().reserved_bytes, 16_MiB + 4_MiB);
}

TEST_F(vmm_objects, a_range_knows_what_it_contains) {
  const address_range range(*on, 4_MiB);
  const address base = range.base();
  EXPECT_TRUE(range.contains(base));
  EXPECT_TRUE(range.contains(base, 4_MiB));
  EXPECT_TRUE(range.contains(base + 4_MiB - 1));
  EXPECT_FALSE(range.contains(base - 1));
  EXPECT_FALSE(range.contains(base + 4_MiB));
  EXPECT_FALSE(range.contains(base + 2_MiB, 2_MiB + 1));
  EXPECT_FALSE(range.contains(base + 1, ~std::size_t{0})) << "no wrap";
}

TEST_F(vmm_objects, leave_nothing_behind_whichever_call_fails) {
  const auto build = [&] {
    const address_range range(*on, 16_MiB);
    const physical_memory memory(*on, request);
    const unique_fd fd = memory.export_fd();
    const auto imported = physical_memory::import_fd(*on, fd.get(), request);
    const mapping first(*on, range.base(), memory, grants);
    const mapping second(*on, range.base() + 4_MiB, imported, grants);
    EXPECT_FALSE(imported.owned());
  };
  std::size_t failures = 0;
  for (;; ++failures) {
    on->fail_call(failures);
    try {
      build();
    } catch (const driver_error&) {
    }
    if (!on->disarm()) break;
    EXPECT_EQ(on->alive(), at_first) << "after failing call " << failures;
  }
  EXPECT_EQ(failures, 8u) << "reserve, create, export, import, and two of map and set_access";
}

TEST_F(vmm_objects, a_fabric_import_that_fails_leaves_nothing) {
  const allocation_request shared{
      .bytes = 2_MiB, .where = request.where, .share = share_kind::fabric};
  const physical_memory owner(*on, shared);
  const auto before = on->alive();
  on->fail_call(driver_call::import_fabric, 0, error_category::unsupported);
  EXPECT_THROW(physical_memory::import_fabric(*on, owner.export_fabric(), shared), unsupported);
  EXPECT_EQ(on->alive(), before);
  const auto imported = physical_memory::import_fabric(*on, owner.export_fabric(), shared);
  EXPECT_FALSE(imported.owned());
  EXPECT_EQ(imported.request().share, share_kind::fabric);
}

TEST_F(vmm_objects, a_mapping_can_be_taken_back_and_tells_of_failure) {
  const address_range range(*on, 4_MiB);
  const physical_memory memory(*on, request);
  mapping mapped(*on, range.base(), memory, grants);
  on->fail_call(driver_call::unmap, 0);
  EXPECT_THROW(mapped.unmap(), driver_error);
  *reinterpret_cast<char*>(range.base()) = 1;  // still mapped
  mapped.unmap();
  EXPECT_EQ(on->alive().mappings, 0u);
  mapped.unmap();  // nothing left to do
}

TEST_F(vmm_objects, a_mapping_is_unmapped_by_the_second_attempt) {
  const address_range range(*on, 4_MiB);
  const physical_memory memory(*on, request);
  {
    const mapping mapped(*on, range.base(), memory, grants);
    on->fail_call(driver_call::unmap, 0);
  }
  EXPECT_TRUE(on->disarm()) << "the first attempt failed";
  EXPECT_EQ(on->alive().mappings, 0u);
}

TEST_F(vmm_objects, destructors_swallow_what_clean_up_throws) {
  const auto handle_leaks = [&] {
    const physical_memory memory(*on, request);
    on->fail_call(driver_call::release, 0);
  };
  ::testing::internal::CaptureStderr();
  handle_leaks();
  const auto logged = ::testing::internal::GetCapturedStderr();
  EXPECT_NE(logged.find("release"), std::string::npos) << logged;
  EXPECT_EQ(on->alive().handles, 1u) << "it could not be given back";
  on->release(allocation_handle{1});
}

}  // namespace
}  // namespace evmm::test
