// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"
#include "tests/support/scoped_variable.hpp"

#include <evmm/address_range.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <future>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <unistd.h>

namespace evmm::test {
namespace {

using namespace evmm::units;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr memory_location k_device{tier::device, 0};
constexpr memory_location k_host{tier::host, 0};

/// What the call's exception says.
template <class Call>
std::string message_of(Call&& call) {
  try {
    call();
  } catch (const error& failure) {
    return failure.what();
  }
  return "nothing was thrown";
}

// --- the machine it pretends to be --------------------------------------------------------------

TEST(host_driver_options, come_from_the_environment) {
  const scoped_variable devices("EVMM_HOST_DEVICES", "3");
  const scoped_variable device_bytes("EVMM_HOST_DEVICE_BYTES", "256M");
  const scoped_variable host_bytes("EVMM_HOST_BYTES", "2G");
  const scoped_variable nodes("EVMM_HOST_NUMA_NODES", "4,0");
  const scoped_variable fabric("EVMM_HOST_FABRIC", "1");
  const auto options = host_driver_options::from_environment();
  EXPECT_EQ(options.devices, 3);
  EXPECT_EQ(options.device_bytes, 256_MiB);
  EXPECT_EQ(options.host_bytes, 2_GiB);
  EXPECT_THAT(options.numa_nodes, ElementsAre(4, 0));
  EXPECT_TRUE(options.fabric);

  const auto on = host_driver::make();
  EXPECT_EQ(on->device_count(), 3);
  EXPECT_EQ(on->describe({2}).total_bytes, 256_MiB);
  EXPECT_EQ(on->usage({tier::host, 4}).total_bytes, 2_GiB);
  EXPECT_THAT(on->numa_nodes(), ElementsAre(numa_node{0}, numa_node{4}));
  EXPECT_TRUE(on->info().fabric_sharing);
}

TEST(host_driver_options, name_the_variable_that_cannot_be_read) {
  const std::vector<std::pair<const char*, std::vector<const char*>>> wrong{
      {"EVMM_HOST_DEVICES", {"0", "-1", "many", "65"}},
      {"EVMM_HOST_DEVICE_BYTES", {"lots", "1X"}},
      {"EVMM_HOST_BYTES", {"-5"}},
      {"EVMM_HOST_NUMA_NODES", {"0,", ",", "0;1", "a"}},
      {"EVMM_HOST_FABRIC", {"2", "yes"}}};
  for (const auto& [name, values] : wrong) {
    for (const char* value : values) {
      const scoped_variable set(name, value);
      EXPECT_THAT(message_of([] { host_driver_options::from_environment(); }),
                  AllOf(HasSubstr("invalid_argument"), HasSubstr(name), HasSubstr(value)));
    }
  }
}

TEST(host_driver_options, of_a_machine_that_cannot_be_are_refused) {
  EXPECT_THROW(host_driver::make({.devices = 0}), invalid_argument);
  EXPECT_THROW(host_driver::make({.numa_nodes = {0, -1}}), invalid_argument);
  EXPECT_THROW(host_driver::make({.numa_nodes = {1, 0, 1}}), invalid_argument);
  EXPECT_THROW(host_driver::make({.numa_nodes = {5000}}), invalid_argument);
}

TEST(host_driver, spreads_its_devices_over_its_nodes) {
  const auto on = host_driver::make({.devices = 4, .numa_nodes = {2, 0}});
  EXPECT_EQ(on->describe({0}).host_node, numa_node{0});
  EXPECT_EQ(on->describe({1}).host_node, numa_node{0});
  EXPECT_EQ(on->describe({3}).host_node, numa_node{2});
  const auto bare = host_driver::make({.numa_nodes = {}});
  EXPECT_FALSE(bare->describe({0}).host_memory);
  EXPECT_FALSE(bare->describe({0}).host_node);
  EXPECT_THAT(message_of([&] { bare->create({.bytes = 2_MiB, .where = k_host}); }),
              HasSubstr("there are: none"));
}

TEST(host_driver, a_refused_node_is_named_with_those_there_are) {
  const auto on = host_driver::make({.numa_nodes = {0, 3}});
  EXPECT_THAT(
      message_of([&] {
        on->create({.bytes = 2_MiB, .where = {tier::host, -1}});
      }),
      AllOf(HasSubstr("HOST_NUMA -1"), HasSubstr("0, 3"), HasSubstr("EVMM_HOST_NUMA_NODES")));
}

TEST(host_driver, offers_nodes_that_the_machine_does_not_have) {
  const auto on = host_driver::make({.numa_nodes = {1000}});
  const memory_location where{tier::host, 1000};
  const physical_memory memory(*on, {.bytes = 2_MiB, .where = where});
  const address_range range(*on, 2_MiB);
  const mapping mapped(*on, range.base(), memory, std::array{access_grant{where}});
  *reinterpret_cast<int*>(range.base()) = 1;
}

// --- capacity -----------------------------------------------------------------------------------

TEST(host_driver, counts_capacity_for_each_device_and_node) {
  const auto on = host_driver::make(
      {.devices = 2, .device_bytes = 8_MiB, .host_bytes = 4_MiB, .numa_nodes = {0, 1}});
  const memory_location other{tier::device, 1};
  const address_range range(*on, 8_MiB);
  std::optional<physical_memory> memory;
  memory.emplace(*on, allocation_request{.bytes = 6_MiB, .where = k_device});
  EXPECT_EQ(on->usage(k_device).free_bytes, 2_MiB);
  EXPECT_EQ(on->usage(other).free_bytes, 8_MiB);
  EXPECT_THAT(message_of([&] { on->create({.bytes = 4_MiB, .where = k_device}); }),
              AllOf(HasSubstr("out_of_memory"), HasSubstr("4.0 MiB on DEVICE 0"),
                    HasSubstr("2.0 MiB of 8.0 MiB free"), HasSubstr("holds 6.0 MiB"),
                    HasSubstr("EVMM_HOST_DEVICE_BYTES")));
  std::optional<mapping> mapped;
  mapped.emplace(*on, range.base(), *memory, std::array{access_grant{k_device}});
  memory.reset();
  EXPECT_EQ(on->usage(k_device).free_bytes, 2_MiB) << "still mapped";
  mapped.reset();
  EXPECT_EQ(on->usage(k_device).free_bytes, 8_MiB);

  const physical_memory node(*on, {.bytes = 4_MiB, .where = k_host});
  EXPECT_EQ(on->usage(k_host).free_bytes, 0u);
  EXPECT_THAT(message_of([&] { on->create({.bytes = 2_MiB, .where = k_host}); }),
              AllOf(HasSubstr("HOST_NUMA 0"), HasSubstr("EVMM_HOST_BYTES")));
  EXPECT_EQ(on->usage({tier::host, 1}).free_bytes, 4_MiB);
}

TEST(host_driver, imports_are_paid_for_by_their_owner) {
  const auto on = host_driver::make({.device_bytes = 4_MiB});
  const allocation_request request{.bytes = 4_MiB, .where = k_device};
  const physical_memory owner(*on, request);
  const auto imported = physical_memory::import_fd(*on, owner.export_fd().get(), request);
  EXPECT_EQ(on->usage(k_device).free_bytes, 0u);
}

TEST(host_driver, takes_no_pages_until_they_are_touched) {
  const auto on = host_driver::make({.device_bytes = 1_TiB});
  const physical_memory memory(*on, {.bytes = 512_GiB, .where = k_device});
  const address_range range(*on, 512_GiB);
  const mapping mapped(*on, range.base(), memory, std::array{access_grant{k_device}});
  auto* const last = reinterpret_cast<char*>(range.base() + 512_GiB - 1);
  EXPECT_EQ(*last, 0);
  *last = 1;
}

TEST(host_driver, has_room_for_many_handles) {
  const auto on = host_driver::make({.device_bytes = 1_TiB});
  const address_range range(*on, 4000 * 2_MiB);
  std::vector<physical_memory> handles;
  std::vector<mapping> mappings;
  for (std::size_t i = 0; i < 4000; ++i) {
    handles.emplace_back(*on, allocation_request{.bytes = 2_MiB, .where = k_device});
    mappings.emplace_back(*on, range.base() + i * 2_MiB, handles.back(),
                          std::array{access_grant{k_device}});
  }
  *reinterpret_cast<char*>(range.base() + 3999 * 2_MiB) = 1;
  EXPECT_EQ(on->usage(k_device).free_bytes, 1_TiB - 4000 * 2_MiB);
}

// --- faults -------------------------------------------------------------------------------------

class host_faults : public ::testing::Test {
 protected:
  void touch(std::size_t offset) const { at(offset) = 1; }
  char look(std::size_t offset) const { return at(offset); }
  volatile char& at(std::size_t offset) const {
    return *reinterpret_cast<volatile char*>(range.base() + offset);
  }
  void set(access_grant grant) { on->set_access(range.base(), 2_MiB, std::array{grant}); }

  const std::shared_ptr<host_driver> on = host_driver::make({.devices = 2});
  const address_range range{*on, 4_MiB};
  const physical_memory memory{*on, {.bytes = 2_MiB, .where = k_host}};
};
using host_faults_DeathTest = host_faults;

TEST_F(host_faults_DeathTest, reserved_addresses_cannot_be_touched) {
  EXPECT_DEATH(touch(0), "");
  {
    const mapping mapped(*on, range.base(), memory, std::array{access_grant{k_host}});
    touch(0);
    touch(2_MiB - 1);
    EXPECT_DEATH(touch(2_MiB), "") << "behind the mapping";
  }
  EXPECT_DEATH(touch(0), "") << "unmapped again";
}

TEST_F(host_faults_DeathTest, access_is_what_any_grant_allows) {
  const mapping mapped(*on, range.base(), memory, std::vector<access_grant>{});
  EXPECT_DEATH(look(0), "") << "nobody has access yet";
  set({k_device, access_kind::read});
  EXPECT_EQ(look(0), 0);
  EXPECT_DEATH(touch(0), "") << "may only be read";
  set({{tier::device, 1}, access_kind::read_write});
  touch(0);
  set({k_device, access_kind::none});
  touch(0);  // those not named keep what they had
  set({{tier::device, 1}, access_kind::none});
  EXPECT_DEATH(look(0), "") << "all was taken away";
}

TEST_F(host_faults, work_on_memory_that_went_fails_its_stream) {
  const auto stream = on->create_stream({0});
  const std::array both{access_grant{k_host}, access_grant{k_device}};
  std::optional<mapping> mapped;
  mapped.emplace(*on, range.base(), memory, both);
  {
    stream_gate gate(*on, stream);
    on->fill(range.base(), std::byte{1}, 64, stream);
    mapped.reset();
  }
  EXPECT_THROW(on->synchronize(stream), driver_error);
  on->synchronize(stream);  // told once

  mapped.emplace(*on, range.base(), memory, std::array{access_grant{k_host, access_kind::read}});
  EXPECT_THROW(on->fill(range.base(), std::byte{1}, 64, stream), invalid_argument);
  char byte = 1;
  on->copy(reinterpret_cast<address>(&byte), range.base(), 1, stream);
  on->synchronize(stream);
  EXPECT_EQ(byte, 0);
  EXPECT_THROW(on->copy(reinterpret_cast<address>(&byte), range.base() + 2_MiB - 1, 2, stream),
               invalid_argument);
  on->destroy_stream(stream);
}

// --- streams ------------------------------------------------------------------------------------

TEST(host_driver, refuses_streams_and_events_that_are_gone) {
  const auto on = host_driver::make({.devices = 1});
  const auto stream = on->create_stream({0});
  const auto event = on->create_event({0});
  on->destroy_stream(stream);
  on->destroy_event(event);
  EXPECT_NE(on->create_stream({0}), stream) << "a name is not used twice";
  EXPECT_NE(on->create_event({0}), event);
  EXPECT_THROW(on->destroy_stream(stream), invalid_argument);
  EXPECT_THROW(on->synchronize(stream), invalid_argument);
  EXPECT_THROW(on->launch(stream, [] {}), invalid_argument);
  EXPECT_THROW(on->capture(stream), invalid_argument);
  EXPECT_THROW(on->record(event, nullptr), invalid_argument);
  EXPECT_THROW(on->wait(nullptr, event), invalid_argument);
  EXPECT_THROW(on->done(event), invalid_argument);
  EXPECT_THROW(on->destroy_event(event), invalid_argument);
}

TEST(host_driver, finishes_all_work_before_it_goes) {
  int ran = 0;
  {
    const auto on = host_driver::make({.devices = 1});
    for (int i = 0; i < 3; ++i) {
      const auto stream = on->create_stream({0});
      on->launch(stream, [&] { ++ran; });
      on->synchronize(stream);
      on->launch(stream, [&, i] { ran += 10 * i; });
      on->destroy_stream(stream);
    }
    on->launch(nullptr, [] {});
  }
  EXPECT_EQ(ran, 3 + 30);
}

TEST(host_driver, refuses_work_past_the_end_of_the_addresses) {
  const auto on = host_driver::make({});
  const address at = on->allocate_pinned(4096);
  const auto most = std::numeric_limits<std::size_t>::max();
  EXPECT_THROW(on->fill(at, std::byte{1}, most, nullptr), invalid_argument);
  EXPECT_THROW(on->copy(at, at, most, nullptr), invalid_argument);
  const address_range range(*on, 2_MiB);
  EXPECT_THROW(on->fill(range.base(), std::byte{1}, most, nullptr), invalid_argument);
  on->synchronize(native_stream{nullptr});
  on->free_pinned(at);
}

TEST(host_driver, addresses_that_there_are_not_are_told_as_such) {
  const auto on = host_driver::make({});
  try {
    on->reserve(std::size_t{1} << 50);
    FAIL() << "there are that many";
  } catch (const driver_error& refused) {
    EXPECT_THAT(refused.message(), HasSubstr("reserving 1024.0 TiB"));
    EXPECT_THAT(refused.help(), HasSubstr("reserve less"));
  }
}

TEST(host_driver, can_be_let_go_by_its_own_stream) {
  auto on = host_driver::make({.devices = 1});
  auto& held = *on;
  const auto stream = held.create_stream({0});
  stream_gate gate(held, stream);
  std::promise<void> gone;
  held.launch(stream, [last = std::move(on), &gone]() mutable {
    last.reset();
    gone.set_value();
  });
  gate.open();
  gone.get_future().wait();
}

// --- pinned and stream-ordered memory -----------------------------------------------------------

TEST(host_driver, pinned_memory_counts_against_the_nodes) {
  const auto on = host_driver::make({.host_bytes = 4_MiB, .numa_nodes = {0, 1}});
  const auto free_bytes = [&](int node) { return on->usage({tier::host, node}).free_bytes; };
  const address first = on->allocate_pinned(3_MiB + 1);
  EXPECT_EQ(free_bytes(0), 1_MiB - 4096) << "whole pages";
  const address second = on->allocate_pinned(2_MiB);
  EXPECT_EQ(free_bytes(1), 2_MiB) << "the first node that has room";
  EXPECT_THAT(
      message_of([&] { on->allocate_pinned(3_MiB); }),
      AllOf(HasSubstr("out_of_memory: cannot pin 3.0 MiB on HOST_NUMA 1: 2.0 MiB of 4.0 MiB"),
            HasSubstr("EVMM_HOST_BYTES")));
  std::vector<std::byte> ordinary(5_MiB);
  EXPECT_THROW(on->pin(reinterpret_cast<address>(ordinary.data()), ordinary.size()), out_of_memory);
  on->pin(reinterpret_cast<address>(ordinary.data()), 1_MiB);
  EXPECT_LT(free_bytes(1), 1_MiB + 4096);
  on->unpin(reinterpret_cast<address>(ordinary.data()));
  on->free_pinned(first);
  on->free_pinned(second);
  EXPECT_EQ(free_bytes(0) + free_bytes(1), 8_MiB);
  const address reserved = on->reserve(2_MiB);
  EXPECT_THAT(message_of([&] { on->pin(reserved, 4096); }), HasSubstr("reserved by the driver"));
  on->free(reserved, 2_MiB);
}

TEST(host_driver, stream_ordered_memory_counts_until_its_free_is_reached_and_it_is_trimmed) {
  const auto on = host_driver::make({.device_bytes = 8_MiB});
  const native_stream first = on->create_stream({0});
  const native_stream second = on->create_stream({0});
  const auto used = [&] { return on->async_usage({0}).used_bytes; };
  const address at = on->allocate_async({0}, 4_MiB, first);
  EXPECT_EQ(on->usage(k_device).free_bytes, 4_MiB);
  {
    stream_gate gate(*on, first);
    on->free_async(at, first);
    EXPECT_EQ(used(), 4_MiB) << "its stream has not come to the free";
    EXPECT_EQ(on->allocate_async({0}, 4_MiB, first), at) << "what follows there may have it";
    on->free_async(at, first);
    const address elsewhere = on->allocate_async({0}, 4_MiB, second);
    EXPECT_NE(elsewhere, at) << "another stream may not";
    on->free_async(elsewhere, second);
    on->synchronize(second);
    EXPECT_THAT(message_of([&] { on->allocate_async({0}, 8_MiB, second); }),
                AllOf(HasSubstr("out_of_memory"), HasSubstr("8.0 MiB on DEVICE 0")));
  }
  on->synchronize(first);
  EXPECT_EQ(used(), 0u);
  EXPECT_EQ(on->async_usage({0}).used_peak, 8_MiB);
  EXPECT_EQ(on->allocate_async({0}, 3_MiB, second), at) << "now it may";
  on->free_async(at, second);
  on->synchronize(second);
  const address whole = on->allocate_async({0}, 8_MiB, second);  // what is cached makes room
  on->free_async(whole, first);
  on->synchronize(first);
  on->trim_async({0}, 8_MiB);
  EXPECT_EQ(on->async_usage({0}).reserved_bytes, 8_MiB);
  on->trim_async({0}, 4_MiB);
  EXPECT_EQ(on->async_usage({0}).reserved_bytes, 0u);
  EXPECT_EQ(on->usage(k_device).free_bytes, 8_MiB);
  on->destroy_stream(first);
  on->destroy_stream(second);
}

TEST(host_driver, reports_itself_as_the_process_on_its_devices) {
  const auto on = host_driver::make({.devices = 2});
  const physical_memory memory(*on, {.bytes = 2_MiB, .where = k_device});
  const auto found = on->processes({0});
  ASSERT_EQ(found.size(), 1u);
  EXPECT_TRUE(found.front().this_process);
  EXPECT_EQ(found.front().pid, ::getpid());
  EXPECT_EQ(found.front().bytes, 2_MiB);
  EXPECT_EQ(on->processes({1}).front().bytes, 0u);
}

}  // namespace
}  // namespace evmm::test
