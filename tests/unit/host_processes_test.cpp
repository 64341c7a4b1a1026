// SPDX-License-Identifier: Apache-2.0
#include "tests/support/fault_driver.hpp"

#include <evmm/address_range.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/mapping.hpp>
#include <evmm/physical_memory.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

// The host driver between processes: forks, descriptors and fabric handles.

namespace evmm::test {
namespace {

using namespace evmm::units;

constexpr memory_location k_device{tier::device, 0};

/// Runs in a forked child; true when it returned true there and ended normally.
template <class Step>
bool in_child(Step&& step) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(step() ? 0 : 1);
  int status = 0;
  return child > 0 && ::waitpid(child, &status, 0) == child && WIFEXITED(status) &&
         WEXITSTATUS(status) == 0;
}

TEST(host_processes, refuses_every_call_in_a_forked_child) {
  auto on = host_driver::make({.devices = 1});
  const auto stream = on->create_stream({0});
  const auto event = on->create_event({0});
  const stream_gate gate(*on, stream);  // the child has no thread that would open it
  const auto base = on->reserve(2_MiB);
  const auto handle = on->create({.bytes = 2_MiB, .where = k_device});
  const std::vector<std::function<void()>> calls{
      [&] { on->info(); },
      [&] { on->device_count(); },
      [&] { on->usage(k_device); },
      [&] { on->reserve(2_MiB); },
      [&] { on->free(base, 2_MiB); },
      [&] { on->create({.bytes = 2_MiB, .where = k_device}); },
      [&] { on->release(handle); },
      [&] { on->map(base, 2_MiB, handle); },
      [&] { on->export_fd(handle); },
      [&] { on->create_stream({0}); },
      [&] { on->synchronize(stream); },
      [&] { on->destroy_stream(stream); },
      [&] { on->done(event); },
      [&] { on->launch(stream, [] {}); },
      [&] { on->begin_capture(stream); }};
  EXPECT_TRUE(in_child([&] {
    for (const auto& call : calls) {
      try {
        call();
        return false;
      } catch (const invalid_argument&) {
      }
    }
    on.reset();  // neither hangs nor throws
    const auto own = host_driver::make({.devices = 1});
    own->release(own->create({.bytes = 2_MiB, .where = k_device}));
#ifndef __SANITIZE_THREAD__  // which starts no thread in a forked child
    own->synchronize(native_stream{nullptr});
#endif
    return true;
  }));
  on->release(handle);
  on->free(base, 2_MiB);
  on->destroy_event(event);
  on->destroy_stream(stream);
}

/// Starts the peer program, which has nothing of this process but the descriptor.
int run_peer(const std::string& how, const std::string& what, int fd) {
  const pid_t child = ::fork();
  if (child == 0) {
    if (fd >= 0) ::dup2(fd, 100);
    ::execl(EVMM_HOST_PEER, EVMM_HOST_PEER, how.c_str(), what.c_str(), nullptr);
    ::_exit(127);
  }
  int status = 0;
  if (child < 0 || ::waitpid(child, &status, 0) != child || !WIFEXITED(status)) return -1;
  return WEXITSTATUS(status);
}

TEST(host_processes, shares_memory_with_another_process) {
  const auto on = host_driver::make({.devices = 1});
  const physical_memory memory(*on, {.bytes = 4_MiB, .where = k_device});
  const address_range range(*on, 4_MiB);
  const mapping mapped(*on, range.base(), memory, std::array{access_grant{k_device}});
  auto* const words = reinterpret_cast<int*>(range.base());
  words[0] = 1234;
  ASSERT_EQ(run_peer("fd", "100", memory.export_fd().get()), 0);
  EXPECT_EQ(words[1], 1235) << "what the peer wrote is seen here";
}

TEST(host_processes, shares_memory_by_fabric_handle) {
  const auto on = host_driver::make({.devices = 1, .fabric = true});
  const allocation_request request{.bytes = 4_MiB, .where = k_device, .share = share_kind::fabric};
  std::string name;
  {
    const physical_memory memory(*on, request);
    const address_range range(*on, 4_MiB);
    const mapping mapped(*on, range.base(), memory, std::array{access_grant{k_device}});
    auto* const words = reinterpret_cast<int*>(range.base());
    words[0] = 99;
    for (const auto byte : memory.export_fabric()) {
      constexpr const char* digits = "0123456789abcdef";
      name += digits[std::to_integer<unsigned>(byte) >> 4];
      name += digits[std::to_integer<unsigned>(byte) & 15];
    }
    ASSERT_EQ(run_peer("fabric", name, -1), 0);
    EXPECT_EQ(words[1], 100);
  }
  EXPECT_NE(run_peer("fabric", name, -1), 0) << "the owner is gone";
}

TEST(host_processes, a_stale_fabric_handle_is_found_out) {
  const auto on = host_driver::make({.devices = 1, .fabric = true});
  const allocation_request request{.bytes = 2_MiB, .where = k_device, .share = share_kind::fabric};
  fabric_handle stale{};
  {
    const physical_memory memory(*on, request);
    stale = memory.export_fabric();
  }
  const physical_memory next(*on, request);  // takes the number of the descriptor that went
  EXPECT_THROW(on->import_fabric(stale, request), invalid_argument);
}

TEST(host_processes, imports_no_foreign_or_mismatched_descriptor) {
  const auto on = host_driver::make({.devices = 1});
  const allocation_request request{.bytes = 2_MiB, .where = k_device};
  const unique_fd plain(::memfd_create("plain", MFD_CLOEXEC));
  ASSERT_EQ(::ftruncate(plain.get(), 2_MiB), 0);
  EXPECT_THROW(on->import_fd(plain.get(), request), invalid_argument)
      << "its owner could shrink it under our feet";
  const physical_memory memory(*on, request);
  const auto fd = memory.export_fd();
  EXPECT_THROW(on->import_fd(fd.get(), {.bytes = 4_MiB, .where = k_device}), invalid_argument)
      << "it has another size";
  EXPECT_NE(::ftruncate(fd.get(), 0), 0) << "nobody can shrink shared memory";
}

}  // namespace
}  // namespace evmm::test
