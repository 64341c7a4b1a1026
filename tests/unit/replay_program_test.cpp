// SPDX-License-Identifier: Apache-2.0
// Runs `evmm replay` as a user does, on the host driver.
#include "tests/support/recorded_traces.hpp"

#include <evmm/allocator/snapshot.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <array>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <sstream>
#include <string>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm {
namespace {

using nlohmann::json;
using testing::AllOf;
using testing::HasSubstr;

struct outcome {
  int code = -1;
  std::string text;
};

class replay_program : public testing::Test {
 protected:
  void SetUp() override {
    std::ofstream(trace_) << "a,1,512,0\n"
                             "a,2,1048576,1\n"
                             "a,3,33554432,2\n"
                             "f,1\n"
                             "c,1\n"
                             "a,4,500,0\n"
                             "f,3\n";
  }
  void TearDown() override {
    for (const auto& path : {trace_, plot_, errors_}) std::remove(path.c_str());
  }

  /// Through a shell, so that a test can set variables. Text is what goes to stdout.
  outcome run(const std::string& words, const std::string& before = "") const {
    outcome result;
    const std::string command =
        "EVMM_DRIVER=host " + before + " " EVMM_PROGRAM " replay " + words + " 2>" + errors_;
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
  std::string errors() const { return contents(errors_); }
  static std::string contents(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  const std::string base_ = testing::TempDir() + "replay_program_" + std::to_string(getpid());
  const std::string trace_ = base_ + ".csv";
  const std::string plot_ = base_ + ".svg";
  const std::string errors_ = base_ + ".err";
};

TEST_F(replay_program, reports_each_pass_as_json) {
  const auto [code, text] = run("--json --passes 2 " + trace_);
  ASSERT_EQ(code, 0) << errors();
  const json report = json::parse(text);
  ASSERT_EQ(report.size(), 2u);
  for (std::size_t pass = 0; pass < 2; ++pass) {
    EXPECT_EQ(report[pass]["trace"], trace_);
    EXPECT_EQ(report[pass]["pass"], pass);
    EXPECT_EQ(report[pass]["events"], 6);  // completions are none
    EXPECT_GT(report[pass]["ns_per_event"], 0);
    EXPECT_EQ(report[pass]["peak_allocated_bytes"], 512 + 1048576 + 33554432);
    EXPECT_GE(report[pass]["reserved_over_allocated"], 1);
    EXPECT_GT(report[pass]["segments"], 0);
  }
  EXPECT_GT(report[0]["driver_calls"], 0);
  EXPECT_GT(report[0]["time_in_driver_calls_ns"], 0);
  EXPECT_GT(report[0]["created_handles"], 0);
  EXPECT_EQ(report[1]["created_handles"], 0) << "what the first pass left serves the second";
  EXPECT_EQ(report[1]["driver_calls"], 0);
}

TEST_F(replay_program, reports_as_text_and_draws) {
  const auto [code, text] = run("--plot " + plot_ + " " + trace_ + " " + trace_);
  ASSERT_EQ(code, 0) << errors();
  EXPECT_THAT(text, AllOf(HasSubstr(": 6 events"), HasSubstr("ns / event")));
  const std::string picture = contents(plot_);
  EXPECT_THAT(picture, AllOf(testing::StartsWith("<svg "), HasSubstr("allocated"),
                             HasSubstr("reserved"), HasSubstr("active")));
}

TEST_F(replay_program, follows_the_configuration) {
  const auto reserved = [&](const std::string& words, const std::string& before = "") {
    const auto [code, text] = run("--json --passes 1 " + words + " " + trace_, before);
    EXPECT_EQ(code, 0) << errors();
    return code == 0 ? json::parse(text)[0]["peak_reserved_bytes"].get<std::int64_t>() : 0;
  };
  const auto native = reserved("--config expandable_segments:False");
  // 512 B and 1 MiB take 2 MiB each on their streams, and the largest is rounded to 2 MiB.
  EXPECT_EQ(native, (2 + 2 + 32) << 20);
  EXPECT_EQ(reserved("--config '  expandable_segments : False '"), native);
  EXPECT_EQ(reserved("", "PYTORCH_ALLOC_CONF=expandable_segments:False"), native);
  EXPECT_GT(reserved("--backend none"), 0);
}

TEST_F(replay_program, what_a_snapshot_does_not_tell_is_said) {
  allocator_snapshot taken;
  const auto entry = [](trace_action action, address at) {
    return trace_entry{.action = action, .at = at, .bytes = 512};
  };
  taken.device_traces = {{entry(trace_action::free_requested, 0x1000),
                          entry(trace_action::free_completed, 0x1000),
                          entry(trace_action::alloc, 0x2000)}};
  std::ofstream(trace_, std::ios::binary) << to_pickle(taken);
  const auto [code, text] = run(trace_);
  EXPECT_EQ(code, 0) << errors();
  EXPECT_THAT(text, HasSubstr(": 1 events"));
  EXPECT_THAT(errors(), HasSubstr(trace_ + ": 1 frees of what was allocated before"));
}

TEST_F(replay_program, what_cannot_be_is_refused) {
  EXPECT_EQ(run("").code, 2);
  EXPECT_EQ(run("--passes 0 " + trace_).code, 2);
  EXPECT_EQ(run("--driver abacus " + trace_).code, 2);
  EXPECT_EQ(run("--backend abacus " + trace_).code, 2);
  EXPECT_EQ(run("/nonexistent.csv").code, 1);
  EXPECT_THAT(errors(), HasSubstr("/nonexistent.csv"));
  EXPECT_EQ(run("--config abacus:1 " + trace_).code, 1);
  EXPECT_THAT(errors(), HasSubstr("abacus"));
  const auto [code, text] = run("--json --plot /nonexistent/plot.svg " + trace_);
  EXPECT_EQ(code, 1);
  EXPECT_THAT(errors(), HasSubstr("/nonexistent/plot.svg: cannot be written"));
  EXPECT_EQ(json::parse(text).size(), 3u) << "what was measured is told all the same";
  std::ofstream(trace_, std::ios::app) << "f,99\n";
  EXPECT_EQ(run(trace_).code, 1);
  EXPECT_THAT(errors(), HasSubstr(trace_ + ":8: 99 was not allocated"));
}

TEST_F(replay_program, a_device_that_is_too_small_is_named_with_the_event) {
  const auto [code, text] = run(trace_, "EVMM_HOST_DEVICE_BYTES=16M");
  EXPECT_EQ(code, 1) << text;
  EXPECT_THAT(errors(), AllOf(HasSubstr("out_of_memory"), HasSubstr(trace_ + ": event 2 of 6")));
}

TEST_F(replay_program, recorded_traces_stay_close_to_what_is_live) {
  const auto paths = test::recorded_traces();
  if (paths.empty()) GTEST_SKIP() << "no recorded traces (EVMM_TRACES, shared/traces)";
  std::ostringstream words;
  words << "--json --passes 2";
  for (const auto& path : paths) words << ' ' << path;
  const auto [code, text] = run(words.str());
  ASSERT_EQ(code, 0) << errors();
  const json report = json::parse(text);
  ASSERT_EQ(report.size(), 2 * paths.size());
  for (const json& each : report) {
    EXPECT_LE(each["reserved_over_allocated"], 1.03) << each.dump();
  }
}

}  // namespace
}  // namespace evmm
