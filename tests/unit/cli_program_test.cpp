// SPDX-License-Identifier: Apache-2.0
// Runs the `evmm` program as a user does, on the host driver.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdio>
#include <string>

#include <sys/wait.h>

namespace evmm {
namespace {

using nlohmann::json;
using testing::HasSubstr;

struct outcome {
  int code = -1;
  std::string text;
};

/// Through a shell, so that a test can set variables and limits for the program alone.
outcome run(const std::string& before, const std::string& words) {
  outcome result;
  const std::string command = before + " " EVMM_PROGRAM " " + words + " 2>&1";
  FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return result;
  std::array<char, 4096> part{};
  for (std::size_t n = 0; (n = std::fread(part.data(), 1, part.size(), pipe)) > 0;) {
    result.text.append(part.data(), n);
  }
  const int status = ::pclose(pipe);
  result.code = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return result;
}

void expect_keys(const json& object, std::initializer_list<const char*> keys) {
  for (const char* key : keys) EXPECT_TRUE(object.contains(key)) << key << " in " << object.dump();
}

TEST(cli_program, info_as_json) {
  const auto [code, text] =
      run("EVMM_DRIVER=host EVMM_HOST_DEVICES=2 EVMM_HOST_NUMA_NODES=0", "info --json");
  EXPECT_EQ(code, 0) << text;
  const json report = json::parse(text);
  expect_keys(report, {"schema", "evmm", "driver", "driver_error", "cuda", "devices", "nodes",
                       "libraries", "proofs"});
  EXPECT_EQ(report["schema"], 1);
  expect_keys(report["evmm"], {"version", "compiled"});
  expect_keys(report["driver"], {"kind", "version", "fd_sharing", "fabric_sharing"});
  EXPECT_EQ(report["driver"]["kind"], "host");
  ASSERT_EQ(report["devices"].size(), 2u);
  for (const json& device : report["devices"]) {
    expect_keys(device, {"id", "name", "pci_bus_id", "total_bytes", "free_bytes", "multiprocessors",
                         "rdma_capable", "host_memory", "host_node_hint", "reaches", "placement"});
    EXPECT_EQ(device["reaches"].size(), 2u);
    expect_keys(device["placement"], {"nodes", "text", "error", "considered"});
  }
  ASSERT_EQ(report["nodes"].size(), 1u);
  expect_keys(report["nodes"][0], {"id", "total_bytes", "free_bytes", "processors", "allowed"});
  for (const char* library : {"nccl", "mpi"}) {
    expect_keys(report["libraries"][library], {"compiled", "found", "path", "why_not"});
  }
  ASSERT_FALSE(report["proofs"].empty());
  for (const json& each : report["proofs"]) {
    expect_keys(each, {"what", "where", "tried", "worked", "detail"});
  }
}

TEST(cli_program, doctor_as_json) {
  const auto [code, text] = run("EVMM_DRIVER=host", "doctor --json");
  const json report = json::parse(text);
  expect_keys(report, {"schema", "status", "findings"});
  EXPECT_EQ(code, report["status"] == "fail" ? 1 : 0);
  ASSERT_GE(report["findings"].size(), 20u);
  for (const json& each : report["findings"]) {
    expect_keys(each, {"check", "status", "title", "found", "meaning", "remedy"});
    EXPECT_THAT(each["status"].get<std::string>(), testing::AnyOf("ok", "warn", "fail"));
    if (each["status"] != "ok") {
      EXPECT_FALSE(each["meaning"].is_null()) << each.dump();
    }
  }
}

TEST(cli_program, doctor_finds_what_would_stop_a_job) {
  const auto [code, text] = run("ulimit -n 64; EVMM_DRIVER=host", "doctor");
  EXPECT_EQ(code, 1) << text;
  EXPECT_THAT(text, HasSubstr("fail  open files"));
  const auto [stops, said] = run("EVMM_DRIVER=host EVMM_ALLOC_CONF=abacus:1", "doctor");
  EXPECT_EQ(stops, 1) << said;
  EXPECT_THAT(said, HasSubstr("EVMM_ALLOC_CONF: allocator options, position 1: 'abacus'"));
}

TEST(cli_program, a_driver_that_does_not_exist) {
  const auto [code, text] = run("EVMM_DRIVER=abacus", "info");
  EXPECT_EQ(code, 1);
  EXPECT_THAT(text, HasSubstr("EVMM_DRIVER is 'abacus'"));
}

TEST(cli_program, a_log_level_that_does_not_exist_hides_nothing) {
  const auto [code, text] = run("EVMM_DRIVER=host EVMM_LOG=loud", "info");
  EXPECT_EQ(code, 0);
  EXPECT_THAT(text, HasSubstr("EVMM_LOG is 'loud'; it takes trace, debug, info, warn"));
  for (const std::string level : {"off", "warn", "error"}) {
    EXPECT_THAT(run("EVMM_DRIVER=host EVMM_LOG=" + level, "info").text,
                testing::Not(HasSubstr("EVMM_LOG")));
  }
}

TEST(cli_program, an_output_that_is_full) {
  const auto [code, text] = run("{ EVMM_DRIVER=host", "info > /dev/full; }");
  EXPECT_EQ(code, 1);
  EXPECT_THAT(text, HasSubstr("standard output cannot be written: No space left on device"));
}

TEST(cli_program, usage) {
  EXPECT_EQ(run("", "--version").code, 0);
  EXPECT_EQ(run("", "--help").code, 0);
  EXPECT_EQ(run("", "").code, 2);
  const auto [code, text] = run("", "nonsense");
  EXPECT_EQ(code, 2);
  EXPECT_THAT(text, HasSubstr("nonsense"));
  EXPECT_EQ(run("", "info --nonsense").code, 2);
}

}  // namespace
}  // namespace evmm
