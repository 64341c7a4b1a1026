// SPDX-License-Identifier: Apache-2.0
// What containers and schedulers do to a job: system calls that are refused, a small /dev/shm,
// ranks of different users, ranks that see different devices. Each rank is a process of its own.
#include "tests/support/directory_store.hpp"
#include "tests/support/rank_processes.hpp"
#include "tests/support/symmetric_cases.hpp"
#include "tests/support/thread_ranks.hpp"

#include <evmm/comm/symmetric_region.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

namespace evmm::test {
namespace {

using namespace evmm::units;

/// Kills the process at system calls that take memory or descriptors out of another one, which
/// many containers refuse. False where no filter can be set.
bool forbid_reaching_into_processes() {
  constexpr std::array<unsigned, 4> forbidden = {SYS_pidfd_getfd, SYS_ptrace, SYS_process_vm_readv,
                                                 SYS_process_vm_writev};
  std::vector<sock_filter> program = {
      BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr))};
  for (std::size_t i = 0; i < forbidden.size(); ++i) {
    program.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, forbidden[i],
                               static_cast<unsigned char>(forbidden.size() - i), 0));
  }
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  program.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS));
  const sock_fprog filter{static_cast<unsigned short>(program.size()), program.data()};
  return ::prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 &&
         ::prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter) == 0;
}

/// Grows a region of `bytes` on each rank in both tiers, and every rank finds every byte of all.
std::string share(const std::shared_ptr<bootstrap>& ranks, std::size_t bytes) {
  symmetric_region region(ranks, host_driver::make({}), {.reserve = 4 * bytes});
  region.grow(tier::device, bytes);
  region.grow(tier::host, bytes);
  expect_shared(region, 3);
  region.close();
  return ::testing::Test::HasFailure() ? "the bytes differ" : "";
}

TEST(containers, nothing_is_taken_out_of_another_process) {
  const forked_process proof([]() -> std::string {
    if (!forbid_reaching_into_processes()) return k_cannot;
    ::syscall(SYS_pidfd_getfd, -1, 0, 0);
    return "it went on";
  });
  const auto filtered = proof.end();
  if (filtered == k_cannot) GTEST_SKIP() << "no system call can be filtered here";
  EXPECT_EQ(filtered, "killed by signal 31");
  const auto ends = run_processes(4, [](const auto& ranks) -> std::string {
    return forbid_reaching_into_processes() ? share(ranks, 2_MiB) : k_cannot;
  });
  EXPECT_EQ(ends, std::vector<std::string>(4));
}

TEST(containers, a_small_dev_shm_limits_nothing) {
  const forked_process container([]() -> std::string {
    if (!move_out(64_MiB)) return k_cannot;
    const auto room = std::filesystem::space("/dev/shm");
    if (room.capacity != 64_MiB) return "this is not the /dev/shm it was to be";
    std::string wrong;
    for (const auto& end :
         run_processes(2, [](const auto& ranks) { return share(ranks, 66_MiB); })) {
      wrong += end;
    }
    return wrong + left_behind();
  });
  const auto end = container.end();
  if (end == k_cannot) GTEST_SKIP() << "no namespaces may be made here";
  EXPECT_EQ(end, "");
}

TEST(containers, ranks_of_different_users_are_told_so) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can be two users";
  const auto since = std::chrono::steady_clock::now();
  const auto ends = run_processes(3, [](const auto& ranks) -> std::string {
    ranks->set_timeout(std::chrono::milliseconds(3000));
    ranks->barrier();
    if (ranks->rank() == rank_id{1} && ::setuid(65534) != 0) return k_cannot;
    return thrown_by([&] { symmetric_region(ranks, host_driver::make({}), {.reserve = 4_MiB}); });
  });
  EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(10));
  for (const std::string& said : ends) {
    EXPECT_EQ(
        said,
        "peer_error: rank 0 runs as user 0, rank 1 of the same node as user 65534; help: start "
        "all ranks of a node as one user");
  }
}

TEST(containers, a_rank_without_proc_is_told_to_all) {
  const directory_store store;
  const auto since = std::chrono::steady_clock::now();
  std::vector<forked_process> ranks;
  for (int rank = 0; rank < 3; ++rank) {
    ranks.emplace_back([&, rank]() -> std::string {
      if (rank == 1 && (!move_out(64_MiB) || ::mount("tmpfs", "/proc", "tmpfs", 0, nullptr) != 0)) {
        return k_cannot;
      }
      return thrown_by([&] { make_store_bootstrap(rank_id{rank}, 3, store.face()); });
    });
  }
  const std::string said = ranks[1].end();
  if (said == k_cannot) GTEST_SKIP() << "no namespaces may be made here";
  EXPECT_EQ(said,
            "unsupported: rank 1: cannot tell which host this is: /proc has no boot id or no "
            "namespaces; help: mount /proc");
  EXPECT_EQ(ranks[0].end(), said);
  EXPECT_EQ(ranks[2].end(), said);
  EXPECT_LT(std::chrono::steady_clock::now() - since, std::chrono::seconds(10));
}

TEST(containers, ranks_may_number_their_devices_differently) {
  const auto ends = run_processes(3, [](const auto& ranks) -> std::string {
    // As with CUDA_VISIBLE_DEVICES: one rank sees four devices and uses the last, others see one.
    const bool sees_all = ranks->rank() == rank_id{0};
    const device_id device{sees_all ? 3 : 0};
    const auto on = host_driver::make({.devices = sees_all ? 4 : 1});
    symmetric_region region(ranks, on, {.device = device, .reserve = 64_MiB});
    region.grow(tier::device, 2_MiB);
    region.grow(tier::host, 2_MiB);
    expect_shared(region, 4);
    region.migrate(0, tier::host);
    region.migrate(0, tier::device);
    expect_still_shared(region, 4);
    region.close();
    return ::testing::Test::HasFailure() ? "the bytes differ" : "";
  });
  EXPECT_EQ(ends, std::vector<std::string>(3));
}

}  // namespace
}  // namespace evmm::test
