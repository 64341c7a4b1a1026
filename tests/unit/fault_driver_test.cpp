// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"

#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <set>

namespace evmm::test {
namespace {

using namespace evmm::units;
using ::testing::ElementsAre;

class fault_driver_test : public ::testing::Test {
 protected:
  const std::shared_ptr<fault_driver> on = fault_driver::make(host_driver::make({.devices = 1}));
  const allocation_request request{.bytes = 2_MiB, .where = {tier::device, 0}};
};

TEST_F(fault_driver_test, counts_what_is_alive) {
  const auto before = on->alive();
  EXPECT_EQ(before.ranges + before.handles + before.mappings + before.streams + before.events, 0u);
  const auto base = on->reserve(8_MiB);
  const auto handle = on->create(request);
  on->map(base, 2_MiB, handle);
  const auto stream = on->create_stream({0});
  const auto event = on->create_event({0});
  auto fd = on->export_fd(handle);
  const auto imported = on->import_fd(fd.get(), request);
  const auto during = on->alive();
  EXPECT_EQ(during.ranges, 1u);
  EXPECT_EQ(during.reserved_bytes, 8_MiB);
  EXPECT_EQ(during.handles, 2u);
  EXPECT_EQ(during.created_bytes, 4_MiB);
  EXPECT_EQ(during.mappings, 1u);
  EXPECT_EQ(during.mapped_bytes, 2_MiB);
  EXPECT_EQ(during.streams, 1u);
  EXPECT_EQ(during.events, 1u);
  EXPECT_GT(during.descriptors, before.descriptors);
  EXPECT_THROW(on->unmap(base + 2_MiB, 2_MiB), invalid_argument);
  EXPECT_THROW(on->free(base, 8_MiB), invalid_argument);
  EXPECT_EQ(on->alive(), during) << "refused calls change nothing";
  fd.reset();
  on->release(imported);
  on->destroy_event(event);
  on->destroy_stream(stream);
  on->unmap(base, 2_MiB);
  on->release(handle);
  on->free(base, 8_MiB);
  EXPECT_EQ(on->alive(), before);
}

TEST_F(fault_driver_test, fails_the_nth_call_once_and_does_nothing) {
  on->fail_call(2, error_category::out_of_memory);
  const auto first = on->create(request);
  const auto base = on->reserve(2_MiB);
  const auto before = on->alive();
  EXPECT_THROW(on->create(request), out_of_memory);
  EXPECT_EQ(on->alive(), before);
  EXPECT_TRUE(on->disarm());
  EXPECT_FALSE(on->disarm()) << "it was told already";
  on->release(on->create(request));
  on->release(first);
  on->free(base, 2_MiB);
}

TEST_F(fault_driver_test, fails_calls_of_one_kind) {
  on->fail_call(driver_call::create, 1, error_category::unsupported);
  const auto base = on->reserve(2_MiB);
  const auto first = on->create(request);
  on->free(base, 2_MiB);
  EXPECT_THROW(on->create(request), unsupported);
  on->fail_call(driver_call::release, 0);
  EXPECT_THROW(on->release(first), driver_error);
  EXPECT_EQ(on->alive().handles, 1u);
  on->release(first);
}

TEST_F(fault_driver_test, clean_up_fails_only_when_asked_for_by_kind) {
  const auto base = on->reserve(2_MiB);
  const auto handle = on->create(request);
  const auto stream = on->create_stream({0});
  const auto event = on->create_event({0});
  on->map(base, 2_MiB, handle);
  on->fail_call(0);
  EXPECT_TRUE(on->done(event));
  on->synchronize(event);
  on->synchronize(stream);
  on->unmap(base, 2_MiB);
  on->release(handle);
  on->free(base, 2_MiB);
  on->destroy_event(event);
  on->destroy_stream(stream);
  EXPECT_FALSE(on->disarm()) << "none of these is a routine failure";
  on->release(on->create(request));
}

TEST_F(fault_driver_test, a_new_failure_replaces_the_one_before) {
  on->fail_call(driver_call::reserve, 0);
  on->fail_call(driver_call::create, 0);
  on->free(on->reserve(2_MiB), 2_MiB);
  EXPECT_THROW(on->create(request), driver_error);
}

TEST_F(fault_driver_test, records_calls_in_order_also_those_that_fail) {
  const auto stream = on->create_stream({0});
  on->clear_record();
  on->fail_call(driver_call::create, 0);
  EXPECT_THROW(on->create(request), driver_error);
  const auto handle = on->create(request);
  on->launch(stream, [] {});
  on->synchronize(stream);
  on->release(handle);
  EXPECT_THAT(on->record_of_calls(),
              ElementsAre(driver_call::create, driver_call::create, driver_call::launch,
                          driver_call::synchronize_stream, driver_call::release));
  on->destroy_stream(stream);
}

TEST_F(fault_driver_test, every_call_has_a_name_of_its_own) {
  std::set<std::string> names;
  for (int i = 0; i <= static_cast<int>(driver_call::launch); ++i) {
    EXPECT_TRUE(names.insert(to_string(static_cast<driver_call>(i))).second) << i;
  }
  EXPECT_EQ(names.count("unknown"), 0u);
}

TEST_F(fault_driver_test, an_error_says_what_failed) {
  on->fail_call(driver_call::map, 0);
  try {
    on->map(0, 0, {});
    FAIL() << "map did not fail";
  } catch (const driver_error& failure) {
    EXPECT_THAT(failure.what(), ::testing::HasSubstr("map"));
  }
}

TEST(stream_gate, holds_what_comes_after_it) {
  const auto on = host_driver::make({.devices = 1});
  const auto stream = on->create_stream({0});
  bool before = false;
  bool after = false;
  on->launch(stream, [&] { before = true; });
  stream_gate gate(*on, stream);
  on->launch(stream, [&] { after = true; });
  gate.wait_reached();
  EXPECT_TRUE(before);
  EXPECT_FALSE(after);
  gate.open();
  on->synchronize(stream);
  EXPECT_TRUE(after);
  on->destroy_stream(stream);
}

TEST(stream_gate, opens_when_it_goes) {
  const auto on = host_driver::make({.devices = 1});
  const auto stream = on->create_stream({0});
  { const stream_gate gate(*on, stream); }
  on->synchronize(stream);
  EXPECT_TRUE(on->idle(stream));
  on->destroy_stream(stream);
}

}  // namespace
}  // namespace evmm::test
