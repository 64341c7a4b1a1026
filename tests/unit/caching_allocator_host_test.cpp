// SPDX-License-Identifier: Apache-2.0
// The caching allocator and what is around it: settings, other processes, forks. Only the host
// driver can be made to do so.
#include "tests/support/descriptor_passing.hpp"
#include "tests/support/fault_driver.hpp"
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/in_child.hpp"
#include "tests/support/refusal.hpp"

#include <evmm/allocator/caching_allocator.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <functional>
#include <future>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include <malloc.h>
#include <sched.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

namespace evmm::test {
namespace {

using namespace evmm::units;

// --- what it counts, moves and shares -----------------------------------------------------------

TEST(allocator_settings, take_no_memory_each_time_they_change) {
  const auto on = host_driver::make();
  caching_allocator allocator(on, device_id{0});
  const auto change = [&] {
    allocator.set_memory_fraction(0.5);
    allocator.set_memory_fraction(1);
  };
  change();
  const std::size_t before = ::mallinfo2().uordblks;
  for (int i = 0; i < 1000; ++i) change();
  EXPECT_LT(::mallinfo2().uordblks, before + 64_KiB);
}

/// Calls back when a thread's device is put back, which is the last thing that a request does.
class parting_driver final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  void set_current_device(std::optional<device_id> device) override {
    forwarding_driver::set_current_device(device);
    if (!device && then) std::exchange(then, nullptr)();
  }
  std::function<void()> then;
};

TEST(allocator_backends, count_what_is_allocated_once) {
  const auto on =
      std::make_shared<parting_driver>(host_driver::make({.devices = 1, .device_bytes = 64_MiB}));
  caching_allocator allocator(
      on, device_id{0}, parse_options("backend:cudaMallocAsync,per_process_memory_fraction:0.125"));
  void* other = nullptr;
  on->then = [&] { other = allocator.allocate(4_MiB); };  // as another thread may
  void* const one = allocator.allocate(4_MiB);
  EXPECT_NE(other, nullptr) << "8 MiB are allowed";
  allocator.free(one);
  allocator.free(other);
}

TEST(allocator_pools, leave_no_records_of_blocks) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 64_MiB});
  caching_allocator allocator(on, device_id{0});
  const auto make_and_release = [&] {
    const pool_id pool = allocator.create_pool();
    allocator.begin_allocate_to_pool(pool);
    for (const std::size_t bytes : {4096u, 3u << 20}) allocator.free(allocator.allocate(bytes));
    allocator.end_allocate_to_pool(pool);
    allocator.release_pool(pool);
  };
  for (int i = 0; i < 50; ++i) make_and_release();
  const auto before = ::mallinfo2().uordblks;
  for (int i = 0; i < 100; ++i) make_and_release();
  EXPECT_LE(::mallinfo2().uordblks, before + 100 * 14_KiB) << "two arenas and their account";
}

TEST(allocator_moves, leave_alone_what_functions_write_meanwhile) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 128_MiB});
  const native_stream writer = on->create_stream(device_id{0});
  const native_stream needy = on->create_stream(device_id{0});
  {
    caching_allocator allocator(on, device_id{0}, parse_options("recycle_handles:wait"));
    std::vector<std::uint64_t*> live;
    std::vector<void*> gaps;
    constexpr std::size_t bytes = 3_MiB;
    for (int i = 0; i < 6; ++i) {
      live.push_back(static_cast<std::uint64_t*>(allocator.allocate(bytes, writer)));
      gaps.push_back(allocator.allocate(bytes, writer));
    }
    std::atomic<std::uint64_t> rounds = 0;
    std::atomic<bool> stop = false;
    const auto write = [&] {
      for (; !stop || rounds == 0; ++rounds) {
        for (std::uint64_t* block : live) {
          for (std::size_t i = 0; i < bytes / 8; i += 512) block[i] = rounds + i;
        }
      }
    };
    for (void* each : gaps) allocator.free(each);
    on->launch(writer, write);
    for (int i = 0; i < 30; ++i) {
      void* const large = allocator.allocate(12_MiB, needy);
      void* const other = allocator.allocate(5_MiB, writer);
      on->fill(at(large), std::byte{0xEE}, 12_MiB, needy);
      allocator.free(large);
      allocator.free(other);
    }
    stop = true;
    on->synchronize(writer);
    on->synchronize(needy);
    for (const std::uint64_t* block : live) {
      for (std::size_t i = 0; i < bytes / 8; i += 512) ASSERT_EQ(block[i], rounds - 1 + i);
    }
    for (std::uint64_t* each : live) allocator.free(each);
  }
  on->destroy_stream(needy);
  on->destroy_stream(writer);
}

TEST(allocator_sharing, an_import_keeps_its_driver) {
  std::shared_ptr<driver> on = host_driver::make({.devices = 1});
  const std::weak_ptr<driver> seen = on;
  auto allocator = std::make_unique<caching_allocator>(on, device_id{0});
  void* const block = allocator->allocate(4_MiB);
  const ipc_handle shared = allocator->export_allocation(block);
  std::shared_ptr<void> imported = allocator->import_allocation(shared);
  for (const int fd : shared.fds) ::close(fd);
  allocator->free(block);
  allocator.reset();
  on.reset();
  EXPECT_FALSE(seen.expired());
  imported.reset();
  EXPECT_TRUE(seen.expired());
}

/// A child that is process 1 of a container shares 2 MiB of `value` over the second socket of a
/// pair, and lives on until the first is closed. False where no container can be made.
bool share_as_process_1(const std::array<int, 2>& ends, int value) {
  const pid_t child = ::fork();
  if (child != 0) {
    int status = 0;
    return ::waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
  }
  if (::unshare(CLONE_NEWPID) != 0 && ::unshare(CLONE_NEWUSER | CLONE_NEWPID) != 0) ::_exit(1);
  if (::fork() != 0) ::_exit(0);
  ::close(ends[0]);
  {
    const auto on = host_driver::make({.devices = 1});
    caching_allocator allocator(on, device_id{0});
    void* const block = allocator.allocate(2_MiB);
    std::memset(block, value, 2_MiB);
    const ipc_handle shared = allocator.export_allocation(block);
    send_message(ends[1], {shared.bytes, shared.fds});
    receive_message(ends[1]);
    allocator.free(block);
  }
  ::_exit(0);
}

TEST(allocator_sharing, processes_of_the_same_number_are_told_apart) {
  std::array<std::array<int, 2>, 2> sockets{};
  for (int i = 0; i < 2; ++i) {
    auto& ends = sockets[static_cast<std::size_t>(i)];
    ASSERT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends.data()), 0);
    if (!share_as_process_1(ends, i + 1)) GTEST_SKIP() << "no namespaces may be made here";
    ::close(ends[1]);
  }
  const auto on = host_driver::make({.devices = 1});
  caching_allocator allocator(on, device_id{0});
  std::vector<std::shared_ptr<void>> imported;
  for (const auto& ends : sockets) {
    const passed_message message = receive_message(ends[0]);
    imported.push_back(allocator.import_allocation({message.bytes, message.fds}));
    for (const int fd : message.fds) ::close(fd);
  }
  EXPECT_EQ(*static_cast<const char*>(imported[0].get()), 1);
  EXPECT_EQ(*static_cast<const char*>(imported[1].get()), 2);
  for (const auto& ends : sockets) ::close(ends[0]);
}

// --- processes ----------------------------------------------------------------------------------

TEST(allocator_processes, a_forked_child_is_refused) {
  const auto on = host_driver::make({.devices = 1});
  const native_stream stream = on->create_stream(device_id{0});
  auto held = std::make_unique<caching_allocator>(on, device_id{0});
  caching_allocator& allocator = *held;
  allocator.free(allocator.allocate(4096, stream));  // cached, and known to the thread
  const pid_t child = ::fork();
  if (child == 0) {
    const auto refused = [&](std::size_t bytes, native_stream on_stream) {
      try {
        (void)allocator.allocate(bytes, on_stream);
      } catch (const invalid_argument& said) {
        return says(said.what(), "fork");
      }
      return false;
    };
    const bool both = refused(4096, stream) && refused(30_MiB, nullptr);
    ::testing::internal::CaptureStderr();
    held.reset();  // what it holds is the parent's
    const std::string said = ::testing::internal::GetCapturedStderr();
    ::_exit(both && said.empty() ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  allocator.free(allocator.allocate(4096, stream));
  held.reset();
  on->destroy_stream(stream);
}

TEST(allocator_processes, a_child_forked_while_a_thread_is_at_work_waits_for_nobody) {
  const auto on = host_driver::make({.devices = 1});
  caching_allocator allocator(on, device_id{0});
  void* const block = allocator.allocate(4096);
  std::promise<void> inside, forked;
  const auto subscription = allocator.on_trace([&](const trace_entry& entry) {
    if (entry.action != trace_action::segment_map) return;
    inside.set_value();  // under the allocator's locks, which the child has as they are
    forked.get_future().wait();
  });
  std::thread at_work([&] { allocator.free(allocator.allocate(2_MiB)); });
  inside.get_future().wait();
  in_child({}, [&] {
    ::alarm(20);
    const std::pair<const char*, std::function<void()>> calls[] = {
        {"statistics", [&] { (void)allocator.statistics(); }},
        {"statistics of a pool", [&] { (void)allocator.statistics(pool_id{}); }},
        {"snapshot", [&] { (void)allocator.snapshot(); }},
        {"report", [&] { (void)allocator.report(); }},
        {"cache_info", [&] { (void)allocator.cache_info(); }},
        {"empty_cache", [&] { allocator.empty_cache(); }},
        {"configure", [&] { allocator.configure(""); }},
        {"create_pool", [&] { (void)allocator.create_pool(); }},
        {"reset_peaks", [&] { allocator.reset_peaks(); }},
        {"record_history", [&] { allocator.record_history({}); }},
        {"record_stream", [&] { allocator.record_stream(&allocator, nullptr); }},
        {"export_allocation", [&] { (void)allocator.export_allocation(&allocator); }}};
    for (const auto& [name, call] : calls) {
      EXPECT_TRUE(says(refusal(call), "before a fork")) << name << ": " << refusal(call);
    }
    EXPECT_FALSE(allocator.owns(&allocator));
    EXPECT_NO_THROW(allocator.free(block)) << "it is the parent's";
  });
  forked.set_value();
  at_work.join();
  allocator.free(block);
}

}  // namespace
}  // namespace evmm::test
