// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/allocator_contract.hpp"
#include "tests/support/descriptor_passing.hpp"

#include <algorithm>
#include <cstring>

#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

// Allocations in other processes, and in this one a second time. The peer program is
// allocation_peer.cpp; EVMM_ALLOCATION_PEER is its path.

namespace evmm::test {

class allocator_sharing_contract : public allocator_contract {
 protected:
  void SetUp() override {
    allocator_contract::SetUp();
    if (on && !on->info().fd_sharing) GTEST_SKIP() << "no sharing by descriptor";
  }
  /// A handle whose descriptors are closed with it.
  class exported {
   public:
    explicit exported(ipc_handle made) : handle(std::move(made)) {}
    exported(const exported&) = delete;
    exported& operator=(const exported&) = delete;
    ~exported() {
      for (const int fd : handle.fds) ::close(fd);
    }
    ipc_handle handle;
  };

  /// Starts the peer with the handle and waits for it; its exit code.
  int run_peer(const ipc_handle& handle, std::size_t bytes) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) return -1;
    posix_spawn_file_actions_t actions;
    ::posix_spawn_file_actions_init(&actions);
    ::posix_spawn_file_actions_adddup2(&actions, ends[1], 3);
    const std::string size = std::to_string(bytes);
    std::string program = EVMM_ALLOCATION_PEER;
    std::string argument = size;
    char* const arguments[] = {program.data(), argument.data(), nullptr};
    std::string which = "EVMM_DRIVER=" + on->info().name;
    std::vector<char*> environment{which.data()};
    for (char** each = environ; *each != nullptr; ++each) {
      if (std::strncmp(*each, "EVMM_DRIVER=", 12) != 0) environment.push_back(*each);
    }
    environment.push_back(nullptr);
    pid_t child = -1;
    const int started =
        ::posix_spawn(&child, program.c_str(), &actions, nullptr, arguments, environment.data());
    ::posix_spawn_file_actions_destroy(&actions);
    ::close(ends[1]);
    const bool sent = started == 0 && send_message(ends[0], {handle.bytes, handle.fds});
    int status = -1;
    if (started == 0) ::waitpid(child, &status, 0);
    ::close(ends[0]);
    return sent && WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  }
};

TEST_P(allocator_sharing_contract, the_same_bytes_are_seen_twice_in_one_process) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    void* const before = allocator->allocate(1_MiB + 512);  // so that it does not start a handle
    void* const block = allocator->allocate(7_MiB);
    write(block, 7_MiB, 1);
    const exported shared(allocator->export_allocation(block));
    {
      const auto again = allocator->import_allocation(shared.handle);
      EXPECT_NE(again.get(), block);
      EXPECT_TRUE(holds(again.get(), 7_MiB, 1)) << config;
      write(again.get(), 7_MiB, 2);
      EXPECT_FALSE(allocator->owns(again.get())) << "it is not for free()";
    }
    EXPECT_TRUE(holds(block, 7_MiB, 2));
    free({before, block});
  }
}

TEST_P(allocator_sharing_contract, another_process_reads_and_writes_it) {
  for (const char* const config : {"", k_segments}) {
    make(config);
    void* const before = allocator->allocate(1_MiB + 512);
    void* const block = allocator->allocate(7_MiB);
    write(block, 7_MiB, 1);
    const exported shared(allocator->export_allocation(block));
    ASSERT_EQ(run_peer(shared.handle, 7_MiB), 0) << config;
    EXPECT_TRUE(holds(block, 7_MiB, 2));
    free({before, block});
  }
}

TEST_P(allocator_sharing_contract, a_handle_is_mapped_once_as_long_as_somebody_holds_it) {
  make();
  void* const block = allocator->allocate(4_MiB);
  const exported shared(allocator->export_allocation(block));
  auto one = allocator->import_allocation(shared.handle);
  const auto mapped = on->alive().mappings;
  const auto two = allocator->import_allocation(shared.handle);
  EXPECT_EQ(one.get(), two.get());
  EXPECT_EQ(on->alive().mappings, mapped);
  one.reset();
  EXPECT_EQ(on->alive().mappings, mapped);
  allocator->free(block);
}

TEST_P(allocator_sharing_contract, the_bytes_of_a_handle_are_the_same_each_time) {
  make();
  void* const block = allocator->allocate(7_MiB);
  void* const other = allocator->allocate(7_MiB);
  const exported one(allocator->export_allocation(block));
  const exported two(allocator->export_allocation(block));
  const exported not_it(allocator->export_allocation(other));
  EXPECT_EQ(one.handle.bytes, two.handle.bytes);
  EXPECT_NE(one.handle.bytes, not_it.handle.bytes);
  EXPECT_EQ(allocator->import_allocation(one.handle).use_count(), 1);
  const auto first = allocator->import_allocation(one.handle);
  EXPECT_EQ(allocator->import_allocation(two.handle), first) << "cached by what it stands for";
  free({block, other});
}

TEST_P(allocator_sharing_contract, an_import_goes_with_its_last_holder) {
  make();
  void* const block = allocator->allocate(4_MiB);
  const exported shared(allocator->export_allocation(block));
  const auto before = on->alive();
  for (int i = 0; i < 3; ++i) {
    const auto mine = allocator->import_allocation(shared.handle);
    EXPECT_GT(on->alive().mappings, before.mappings);
  }
  alive_counts after = on->alive();
  after.descriptors = before.descriptors;
  EXPECT_EQ(after, before);
  allocator->free(block);
}

TEST_P(allocator_sharing_contract, an_import_outlives_the_allocation_and_the_allocator) {
  make();
  void* const block = allocator->allocate(4_MiB);
  write(block, 4_MiB, 5);
  std::shared_ptr<void> mine;
  {
    const exported shared(allocator->export_allocation(block));
    mine = allocator->import_allocation(shared.handle);
  }
  allocator->free(block);
  allocator->empty_cache();
  allocator.reset();
  EXPECT_TRUE(holds(mine.get(), 4_MiB, 5));
}

TEST_P(allocator_sharing_contract, memory_that_moved_is_other_memory) {
  make();
  void* const block = allocator->allocate(4_MiB);
  const exported then(allocator->export_allocation(block));
  const auto old = allocator->import_allocation(then.handle);
  allocator->free(block);
  allocator->empty_cache();
  void* const next = allocator->allocate(4_MiB);
  write(next, 4_MiB, 6);
  const exported now(allocator->export_allocation(next));
  const auto fresh = allocator->import_allocation(now.handle);
  EXPECT_NE(fresh.get(), old.get());
  EXPECT_TRUE(holds(fresh.get(), 4_MiB, 6));
  allocator->free(next);
}

TEST_P(allocator_sharing_contract, blocks_of_one_handle_share_their_bytes_alone) {
  make();
  void* const one = allocator->allocate(4096);
  void* const two = allocator->allocate(4096);
  write(one, 4096, 1);
  write(two, 4096, 2);
  const exported shared_one(allocator->export_allocation(one));
  const exported shared_two(allocator->export_allocation(two));
  const auto first = allocator->import_allocation(shared_one.handle);
  const auto second = allocator->import_allocation(shared_two.handle);
  EXPECT_TRUE(holds(first.get(), 4096, 1));
  EXPECT_TRUE(holds(second.get(), 4096, 2));
  free({one, two});
}

TEST_P(allocator_sharing_contract, what_cannot_be_shared_or_read_is_refused) {
  make();
  void* const block = allocator->allocate(4_MiB);
  int foreign = 0;
  EXPECT_THROW((void)allocator->export_allocation(&foreign), invalid_argument);
  const exported shared(allocator->export_allocation(block));
  const auto import = [&](std::string bytes, std::vector<int> fds) {
    return refusal([&] { (void)allocator->import_allocation({std::move(bytes), std::move(fds)}); });
  };
  const ipc_handle& good = shared.handle;
  EXPECT_TRUE(says(import("", good.fds), "ends"));
  EXPECT_TRUE(says(import(std::string(64, 'x'), good.fds), "no IPC handle"));
  EXPECT_TRUE(says(import(good.bytes.substr(0, good.bytes.size() - 1), good.fds), "ends"));
  EXPECT_TRUE(says(import(good.bytes + "more", good.fds), "has 4 more"));
  EXPECT_TRUE(says(import(good.bytes, {}), "descriptors"));
  const auto before = on->alive();
  EXPECT_THROW(
      (void)allocator->import_allocation({good.bytes, std::vector<int>(good.fds.size(), -1)}),
      error);
  alive_counts after = on->alive();
  after.descriptors = before.descriptors;
  EXPECT_EQ(after, before) << "a failed import leaves nothing";
  allocator->free(block);
}

TEST_P(allocator_sharing_contract, another_device_reaches_imports_too) {
  if (on->device_count() < 2) GTEST_SKIP() << "one device";
  if (!on->can_access(device_id{1}, device_id{0})) GTEST_SKIP() << "no peer access";
  make();
  void* const block = allocator->allocate(4_MiB);
  const exported shared(allocator->export_allocation(block));
  const auto grants = [&] {
    const auto all = on->record_of_calls();
    return std::count(all.begin(), all.end(), driver_call::set_access);
  };
  auto existing = allocator->import_allocation(shared.handle);
  on->clear_record();
  allocator->enable_peer(device_id{1});
  EXPECT_EQ(grants(), 4) << "two handles, mapped twice";
  write_pattern(*on, at(existing.get()), 4_MiB, 7, device_id{1});
  EXPECT_TRUE(holds(block, 4_MiB, 7));
  existing.reset();
  const auto future = allocator->import_allocation(shared.handle);
  write_pattern(*on, at(future.get()), 4_MiB, 8, device_id{1});
  EXPECT_TRUE(holds(block, 4_MiB, 8));
  allocator->free(block);
}

TEST_P(allocator_sharing_contract, imports_do_not_count_as_its_own_memory) {
  make();
  void* const block = allocator->allocate(4_MiB);
  const auto before = allocator->statistics();
  const exported shared(allocator->export_allocation(block));
  const auto mine = allocator->import_allocation(shared.handle);
  const auto after = allocator->statistics();
  EXPECT_EQ(after.reserved_bytes.all, before.reserved_bytes.all);
  EXPECT_EQ(after.allocation.all, before.allocation.all);
  allocator->free(block);
}

}  // namespace evmm::test
