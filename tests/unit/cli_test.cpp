// SPDX-License-Identifier: Apache-2.0
// The parts of the `evmm` program that judge and render; cli_program_test runs the program.
#include "lib/cli/device_checks.hpp"
#include "lib/cli/doctor.hpp"
#include "lib/cli/info.hpp"
#include "lib/cli/libraries.hpp"
#include "lib/cli/limit_checks.hpp"
#include "lib/cli/sharing_checks.hpp"
#include "lib/support/nccl_version.hpp"
#include "tests/support/forwarding_driver.hpp"
#include "tests/support/scoped_variable.hpp"

#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <memory>
#include <string>

namespace evmm::cli {
namespace {

using namespace evmm::units;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::Not;

TEST(cli_limits, open_files) {
  EXPECT_EQ(judge_open_files({65536, 65536}).level, status::ok);
  EXPECT_EQ(judge_open_files({std::nullopt, std::nullopt}).found,
            "unlimited (hard limit unlimited)");
  const finding few = judge_open_files({1024, 1048576});
  EXPECT_EQ(few.level, status::warn);
  EXPECT_EQ(few.remedy, "ulimit -n 1048576");
  const finding none = judge_open_files({64, 64});
  EXPECT_EQ(none.level, status::fail);
  EXPECT_THAT(none.remedy, HasSubstr("hard limit"));
}

TEST(cli_limits, locked_memory_matters_to_network_cards_only) {
  EXPECT_EQ(judge_locked_memory({8_MiB, 8_MiB}, false).level, status::ok);
  EXPECT_EQ(judge_locked_memory({8_MiB, 8_MiB}, true).level, status::warn);
  EXPECT_EQ(judge_locked_memory({std::nullopt, std::nullopt}, true).level, status::ok);
}

TEST(cli_limits, address_space) {
  EXPECT_EQ(judge_address_space({std::nullopt, std::nullopt}, true).level, status::ok);
  EXPECT_EQ(judge_address_space({4_GiB, 4_GiB}, false).remedy, "ulimit -v unlimited");
  EXPECT_EQ(judge_address_space({std::nullopt, std::nullopt}, false).level, status::fail);
}

TEST(cli_limits, kernel_settings) {
  EXPECT_EQ(judge_overcommit(0).level, status::ok);
  EXPECT_EQ(judge_overcommit(1).level, status::ok);
  EXPECT_EQ(judge_overcommit(2).level, status::warn);
  EXPECT_EQ(judge_map_count(65530).level, status::ok);
  EXPECT_EQ(judge_map_count(1000).level, status::warn);
}

TEST(cli_limits, shared_memory) {
  EXPECT_EQ(judge_shared_memory(8_GiB, 8_GiB).level, status::ok);
  EXPECT_THAT(judge_shared_memory(8_GiB, 8_GiB).remedy, IsEmpty());
  EXPECT_EQ(judge_shared_memory(64_MiB, 64_MiB).level, status::warn);
  EXPECT_EQ(judge_shared_memory(64_MiB, 1_MiB).level, status::fail);
  EXPECT_EQ(judge_shared_memory(std::nullopt, 0).level, status::fail);
}

TEST(cli_limits, memory_limit) {
  EXPECT_EQ(judge_memory_limit(std::nullopt, 0, 64_GiB).level, status::ok);
  EXPECT_EQ(judge_memory_limit(128_GiB, 0, 64_GiB).level, status::ok);
  EXPECT_EQ(judge_memory_limit(16_GiB, 1_GiB, 64_GiB).level, status::warn);
  EXPECT_EQ(judge_memory_limit(16_GiB, 16_GiB - 1_MiB, 64_GiB).level, status::fail);
  EXPECT_EQ(judge_memory_limit(1_GiB, 2_GiB, 64_GiB).level, status::fail);
}

TEST(cli_limits, allocator_options) {
  EXPECT_EQ(judge_allocator_options("", "").found, "the defaults");
  EXPECT_EQ(judge_allocator_options("", "handle_fraction:8").found, "handle_fraction:8");
  EXPECT_EQ(judge_allocator_options("no such key", "").level, status::fail);
}

TEST(cli_limits, timeout) {
  EXPECT_EQ(judge_timeout("", 30'000).found, "30000 ms");
  EXPECT_EQ(judge_timeout("no integer", 0).level, status::fail);
  EXPECT_EQ(check_timeout().level, status::ok);
  const test::scoped_variable soon("EVMM_TIMEOUT_MS", "soon");
  EXPECT_EQ(check_timeout().level, status::fail);
  EXPECT_THAT(check_timeout().found, HasSubstr("'soon'"));
}

TEST(cli_limits, control_groups_of_both_versions) {
  const auto second = parse_cgroup("0::/user.slice/job\n");
  ASSERT_TRUE(second);
  EXPECT_EQ(second->path, "/user.slice/job");
  EXPECT_TRUE(second->unified);
  const auto first = parse_cgroup("9:name=systemd:/\n4:cpu,memory:/job:a\n0::/\n");
  ASSERT_TRUE(first);
  EXPECT_EQ(first->path, "/job:a");
  EXPECT_FALSE(first->unified);
  EXPECT_FALSE(parse_cgroup(""));
  EXPECT_FALSE(parse_cgroup("garbage\nmore\n"));
  EXPECT_EQ(parse_cgroup_limit("1048576\n"), 1_MiB);
  EXPECT_EQ(parse_cgroup_limit("max\n"), std::nullopt);
  EXPECT_EQ(parse_cgroup_limit("9223372036854771712\n"), std::nullopt);
}

TEST(cli_sharing, probes_of_the_sandbox) {
  EXPECT_EQ(judge_descriptor_passing(0).found, "works");
  EXPECT_EQ(judge_descriptor_passing(EPERM).level, status::fail);
  EXPECT_EQ(judge_pidfd(EPERM).level, status::ok);
  EXPECT_THAT(judge_pidfd(EPERM).found, HasSubstr("refused"));
  EXPECT_EQ(judge_memory_policy(EPERM).remedy, "docker run --cap-add SYS_NICE");
  EXPECT_EQ(judge_memfd(ENOSYS).level, status::warn);
  EXPECT_EQ(judge_ptrace_scope(std::nullopt).level, status::ok);
  EXPECT_EQ(judge_ptrace_scope(1).level, status::ok);
  EXPECT_EQ(judge_ptrace_scope(3).level, status::warn);
}

TEST(cli_sharing, seccomp_and_no_new_privileges) {
  const finding filtered =
      judge_sandbox("Name:\tx\nNoNewPrivs:\t1\nSeccomp:\t2\nSeccomp_filters:\t3\n");
  EXPECT_EQ(filtered.level, status::ok);
  EXPECT_EQ(filtered.found, "seccomp mode 2, no_new_privs 1");
  EXPECT_EQ(judge_sandbox("Name:\tx\nSeccomp:\t1\n").level, status::fail);
  EXPECT_EQ(judge_sandbox("").found, "seccomp off, no_new_privs 0");
}

TEST(cli_sharing, this_process_passes_a_descriptor_to_itself) {
  EXPECT_EQ(check_descriptor_passing().found, "works");
}

TEST(cli_devices, gpu_driver) {
  EXPECT_EQ(judge_gpu_driver(true, "", 4).level, status::ok);
  EXPECT_EQ(judge_gpu_driver(false, "no CUDA driver", 0).level, status::warn);
  const finding hidden = judge_gpu_driver(false, "no CUDA driver", 4);
  EXPECT_EQ(hidden.level, status::fail);
  EXPECT_THAT(hidden.found, HasSubstr("4 NVIDIA GPUs"));
}

TEST(cli_devices, peers) {
  EXPECT_EQ(judge_peers({{true}}).level, status::ok);
  EXPECT_EQ(judge_peers({{true, true}, {true, true}}).level, status::ok);
  EXPECT_THAT(judge_peers({{true, false}, {true, true}}).found, HasSubstr("0 to 1"));
}

TEST(cli_devices, locality_and_nodes) {
  EXPECT_EQ(judge_locality({}, 2).level, status::ok);
  EXPECT_EQ(judge_locality({0, 1}, 1).level, status::ok);
  EXPECT_EQ(judge_locality({0, 1}, 2).level, status::warn);
  EXPECT_EQ(judge_locality({0, 1}, 0).level, status::warn) << "nothing says that there is one node";
  EXPECT_EQ(judge_allowed_nodes({{numa_node{0}, 1_GiB, 4, true}}).level, status::ok);
  EXPECT_THAT(
      judge_allowed_nodes({{numa_node{0}, 1_GiB, 4, true}, {numa_node{1}, 1_GiB, 4, false}}).found,
      HasSubstr("but 1"));
  const finding hidden = judge_allowed_nodes({});
  EXPECT_EQ(hidden.level, status::warn);
  EXPECT_EQ(hidden.found, "no node is told");
  EXPECT_THAT(hidden.remedy, HasSubstr("/sys"));
}

TEST(cli_devices, iommu) {
  EXPECT_EQ(judge_iommu({}).level, status::ok);
  EXPECT_EQ(judge_iommu({"identity"}).level, status::ok);
  EXPECT_EQ(judge_iommu({"identity", "DMA-FQ"}).level, status::warn);
}

TEST(cli_devices, nccl_is_sought_where_the_library_seeks_it) {
  ::setenv("EVMM_NCCL_LIBRARY", "/nowhere/libnccl.so.2", 1);
  const auto none = look_for_nccl();
  ::unsetenv("EVMM_NCCL_LIBRARY");
  EXPECT_EQ(none.found, "");
  EXPECT_THAT(none.why_not, HasSubstr("/nowhere/libnccl.so.2"));
}

TEST(cli_devices, nccl_versions) {
  EXPECT_EQ(nccl_version_text(22809), "2.28.9");
  EXPECT_EQ(nccl_version_text(2804), "2.8.4");
  EXPECT_EQ(nccl_version_code("2.30.3"), 23003);
  EXPECT_EQ(nccl_version_code(""), 0);
  const auto with = [](std::string compiled, std::string found) {
    return library_versions{std::move(compiled), std::move(found), "/lib/libnccl.so.2", ""};
  };
  EXPECT_EQ(judge_nccl(with("2.28.9", "2.30.7"), true).level, status::ok);
  EXPECT_THAT(judge_nccl(with("2.28.9", "2.30.7"), true).found, HasSubstr("not GIN"));
  EXPECT_THAT(judge_nccl(with("2.30.7", "2.30.7"), true).found, Not(HasSubstr("GIN")));
  EXPECT_THAT(judge_nccl(with("2.28.9", "2.28.9"), true).meaning, HasSubstr("host segment"));
  EXPECT_THAT(judge_nccl(with("2.30.7", "2.28.9"), true).meaning, HasSubstr("newer"));
  EXPECT_EQ(judge_nccl(with("2.30.7", ""), true).level, status::fail);
  EXPECT_EQ(judge_nccl(with("2.30.7", ""), false).level, status::ok);
}

TEST(cli_proof, the_host_driver_does_all_but_the_fabric) {
  const auto on = host_driver::make({.devices = 2, .numa_nodes = {0}, .fabric = false});
  const auto proofs = prove_all(*on);
  ASSERT_EQ(proofs.size(), 7u + 7u + 8u);
  for (const proof& each : proofs) {
    EXPECT_TRUE(each.tried) << each.where << " " << each.what;
    EXPECT_EQ(each.worked, each.what != "fabric") << each.where << " " << each.what << each.detail;
  }
}

TEST(cli_proof, what_needs_a_failed_step_is_not_tried) {
  const auto on = host_driver::make({.devices = 1, .device_bytes = 0, .numa_nodes = {0}});
  const auto proofs = prove(*on, memory_location::on(device_id{0}), device_id{0});
  ASSERT_FALSE(proofs.empty());
  EXPECT_TRUE(proofs.front().tried);
  EXPECT_THAT(proofs.front().detail, HasSubstr("out_of_memory"));
  EXPECT_TRUE(std::none_of(proofs.begin() + 1, proofs.end() - 1,
                           [](const proof& each) { return each.tried; }));
}

machine pretended_machine() {
  machine here;
  here.on = host_driver::make({.devices = 2, .numa_nodes = {0}});
  here.cuda_why_not = "a test";
  here.map.emplace(topology::load());
  return here;
}

TEST(cli_info, has_a_line_for_each_thing) {
  auto here = pretended_machine();
  const info_report report = collect_info(here);
  EXPECT_EQ(exit_code(report), 0);
  EXPECT_THAT(to_text(report),
              testing::AllOf(HasSubstr("driver     host"), HasSubstr("DEVICE 1: host device 1"),
                             HasSubstr("reaches    0 1"), HasSubstr("HOST_NUMA 0 for DEVICE 0"),
                             HasSubstr("create map access touch cpu")));
}

/// As a device that another process has for itself, and a sandbox without sysfs.
class secretive_driver final : public test::forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  memory_usage usage(memory_location /*where*/) const override {
    throw driver_error("the device is taken");
  }
};

TEST(cli_info, memory_that_is_not_told_hides_nothing_else) {
  auto here = pretended_machine();
  here.on = std::make_shared<secretive_driver>(here.on);
  const info_report report = collect_info(here);
  EXPECT_EQ(exit_code(report), 0);
  EXPECT_THAT(to_text(report), testing::AllOf(HasSubstr("DEVICE 1: host device 1"),
                                              HasSubstr("not told: driver_error: the device is"),
                                              HasSubstr("create map access touch cpu")));
  const auto json = to_json(report);
  EXPECT_EQ(json["devices"][0]["free_bytes"], nullptr);
  EXPECT_THAT(json["nodes"][0]["memory_error"].get<std::string>(), HasSubstr("is taken"));
}

TEST(cli_info, without_a_driver_says_why) {
  machine here;
  here.driver_error = "nothing works";
  const info_report report = collect_info(here);
  EXPECT_EQ(exit_code(report), 1);
  EXPECT_THAT(to_text(report), HasSubstr("none: nothing works"));
  EXPECT_EQ(to_json(report)["driver"], nullptr);
  EXPECT_EQ(to_json(report)["driver_error"], "nothing works");
}

TEST(cli_doctor, a_failed_check_sets_the_exit_code_and_shows_its_remedy) {
  std::vector<diagnosis> all = {{"a", "first", {.level = status::ok, .found = "fine"}},
                                {"b", "second", {.level = status::warn, .found = "small"}}};
  EXPECT_EQ(exit_code(all), 0);
  EXPECT_EQ(to_json(all)["status"], "warn");
  all.push_back(
      {"c",
       "third",
       {.level = status::fail, .found = "bad", .meaning = "no job", .remedy = "mend it"}});
  EXPECT_EQ(exit_code(all), 1);
  EXPECT_THAT(to_text(all), testing::AllOf(HasSubstr("fail  third"), HasSubstr("remedy: mend it"),
                                           HasSubstr("1 ok, 1 to note, 1 that would stop a job")));
}

TEST(cli_doctor, runs_without_a_driver) {
  machine here;
  here.driver_error = "nothing works";
  const auto all = run_doctor(here);
  EXPECT_EQ(exit_code(all), 1);
  const auto failed = std::find_if(
      all.begin(), all.end(), [](const diagnosis& each) { return each.check == "driver_starts"; });
  ASSERT_NE(failed, all.end());
  EXPECT_EQ(failed->result.found, "nothing works");
}

TEST(cli_doctor, check_names_are_unique) {
  const auto all = run_doctor(pretended_machine());
  std::vector<std::string> names;
  for (const auto& each : all) names.push_back(each.check);
  std::sort(names.begin(), names.end());
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
}

}  // namespace
}  // namespace evmm::cli
