// SPDX-License-Identifier: Apache-2.0
// Recorded allocation traces: the lines, gzip, the history of a snapshot, and what is refused.
#include "lib/allocator/trace_file.hpp"

#include "tests/support/recorded_traces.hpp"

#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <zlib.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <string>

#include <sys/stat.h>
#include <unistd.h>

namespace evmm {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using kind = trace_event::kind;

trace_event allocate(std::uint32_t id, std::size_t bytes, std::uint16_t stream = 0) {
  return {.bytes = bytes, .id = id, .stream = stream, .what = kind::allocate};
}
trace_event free(std::uint32_t id) {
  return {.id = id, .what = kind::free};
}
trace_event freed(std::uint32_t id) {
  return {.id = id, .what = kind::freed};
}

TEST(trace_file, reads_the_documented_lines) {
  const auto trace = parse_trace(
      "# made by hand\n"
      "a,900,512,0\n"
      "\n"
      "a,7,1048576,3\r\n"
      "f,900\n"
      "c,900\n"
      "a,18446744073709551615,1,1\n"
      "f,7",  // no newline at the end, and no completion
      "t.csv");
  EXPECT_THAT(trace.events, ElementsAre(allocate(0, 512), allocate(1, 1048576, 3), free(0),
                                        freed(0), allocate(2, 1, 1), free(1)));
  EXPECT_EQ(trace.source, "t.csv");
  EXPECT_EQ(trace.allocations, 3u);
  EXPECT_EQ(trace.streams, 4u);
  EXPECT_EQ(trace.peak_bytes, 1048576u + 512u);
  EXPECT_EQ(trace.unknown_frees, 0u);
}

TEST(trace_file, an_event_is_small) {
  EXPECT_EQ(sizeof(trace_event), 16u);
}

struct bad_line {
  std::string text;
  std::string complaint;
};

class trace_file_errors : public testing::TestWithParam<bad_line> {};

TEST_P(trace_file_errors, are_refused_with_file_line_and_reason) {
  try {
    parse_trace("a,1,512,0\nf,1\na,2,512,0\n" + GetParam().text + "\na,99,1,0\n", "bad.csv");
    FAIL() << "accepted: " << GetParam().text;
  } catch (const invalid_argument& refused) {
    EXPECT_THAT(refused.message(), HasSubstr("bad.csv:4: "));
    EXPECT_THAT(refused.message(), HasSubstr(GetParam().complaint));
    EXPECT_THAT(refused.help(), HasSubstr("a,ID,BYTES,STREAM"));
  }
}

INSTANTIATE_TEST_SUITE_P(
    lines, trace_file_errors,
    testing::Values(
        bad_line{"x,1", "'x' is none of a, f and c"}, bad_line{"allocate", "'allocate' is none"},
        bad_line{" a,3,512,0", "' a' is none"}, bad_line{"a,3,512", "3 fields, but `a` has 4"},
        bad_line{"a,3,512,0,0", "5 fields, but `a` has 4"},
        bad_line{"f", "1 fields, but `f` has 2"}, bad_line{"f,2,512", "3 fields, but `f` has 2"},
        bad_line{"a,,512,0", "'' is not an id"}, bad_line{"a,-3,512,0", "'-3' is not an id"},
        bad_line{"a,3x,512,0", "'3x' is not an id"},
        bad_line{"a,18446744073709551616,512,0", "is not an id"},
        bad_line{"a,3,0,0", "'0' is not a size"}, bad_line{"a,3,1e6,0", "'1e6' is not a size"},
        bad_line{"a,3,1152921504606846976,0", "is not a size in bytes from 1 to"},
        bad_line{"a,3,512,-1", "'-1' is not a stream"},
        bad_line{"a,3,512,4096", "'4096' is not a stream from 0 to 4095"},
        bad_line{"a,2,512,0", "2 is allocated twice"},
        bad_line{"a,1,512,0", "1 is allocated twice"}, bad_line{"f,3", "3 was not allocated"},
        bad_line{"c,3", "3 was not allocated"}, bad_line{"f,1", "1 was freed before"},
        bad_line{"c,2", "2 has completed its free before it was asked for"},
        bad_line{"f,", "'' is not an id"},
        bad_line{std::string(3, '\0'), "'\\x00\\x00\\x00' is none of a, f and c"},
        bad_line{std::string(5000, 'x'), std::string(60, 'x') + "...' is none"},
        bad_line{"\xef\xbb\xbf"
                 "a,3,512,0",
                 "'\\xef\\xbb\\xbfa' is none"},
        bad_line{"a,3,1152921504606846975,0", "1 EiB or more is live at one time"}));

TEST(trace_file, a_free_completes_once) {
  try {
    parse_trace("a,1,512,0\nf,1\nc,1\nc,1\n", "bad.csv");
    FAIL();
  } catch (const invalid_argument& refused) {
    EXPECT_EQ(refused.message(), "bad.csv:4: 1 has completed its free before");
  }
}

TEST(trace_file, refuses_a_text_without_events_and_a_file_that_is_not_there) {
  EXPECT_THROW(parse_trace("", "t.csv"), invalid_argument);
  EXPECT_THROW(parse_trace("# nothing\n", "t.csv"), invalid_argument);
  try {
    read_trace("/nonexistent/trace.csv");
    FAIL();
  } catch (const invalid_argument& refused) {
    EXPECT_THAT(refused.what(),
                HasSubstr("/nonexistent/trace.csv: cannot be opened: No such file"));
    EXPECT_EQ(refused.native_code(), ENOENT);
  }
}

class trace_file_on_disk : public testing::Test {
 protected:
  void TearDown() override { std::remove(path_.c_str()); }
  std::string path_ = testing::TempDir() + "trace_file_" + std::to_string(getpid()) + ".csv.gz";

  void write(const std::string& text) { std::ofstream(path_, std::ios::binary) << text; }
  void write_gzip(const std::string& text) {
    gzFile file = gzopen(path_.c_str(), "wb");
    ASSERT_EQ(gzwrite(file, text.data(), static_cast<unsigned>(text.size())),
              static_cast<int>(text.size()));
    gzclose(file);
  }
};

TEST_F(trace_file_on_disk, may_be_plain_or_gzipped) {
  const std::string text = "a,1,512,0\nf,1\n";
  write(text);
  const auto plain = read_trace(path_);
  EXPECT_EQ(plain.source, path_);
  EXPECT_THAT(plain.events, ElementsAre(allocate(0, 512), free(0)));
  write_gzip(text);
  EXPECT_EQ(read_trace(path_).events, plain.events);
}

TEST_F(trace_file_on_disk, must_be_complete) {
  std::string text;
  for (int line = 0; line < 5000; ++line) {
    text += "a," + std::to_string(line) + "," + std::to_string(1 + line * 7919 % 100003) + ",0\n";
  }
  write_gzip(text);
  EXPECT_EQ(read_trace(path_).allocations, 5000u);
  struct stat status {};
  ASSERT_EQ(stat(path_.c_str(), &status), 0);
  // In the middle, in the checksum at the end, and in the header.
  for (const auto size : {status.st_size / 2, status.st_size - 1, off_t{5}}) {
    ASSERT_EQ(truncate(path_.c_str(), size), 0);
    try {
      read_trace(path_);
      ADD_FAILURE() << "accepted at " << size << " bytes";
    } catch (const invalid_argument& refused) {
      EXPECT_THAT(refused.message(),
                  testing::ContainsRegex(R"(csv\.gz:[0-9]+: cannot be read further: )"));
    }
  }
}

TEST_F(trace_file_on_disk, damage_is_refused) {
  write_gzip("a,1,512,0\nf,1\n");
  std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
  file.seekp(-6, std::ios::end);  // in the checksum
  file.put('\x55');
  file.close();
  EXPECT_THROW(read_trace(path_), invalid_argument);
}

// --- snapshots --------------------------------------------------------------------------------

trace_entry entry(trace_action action, address at, std::size_t bytes, std::uintptr_t stream = 0) {
  return {.action = action,
          .at = at,
          .bytes = bytes,
          .stream = reinterpret_cast<native_stream>(stream)};
}

TEST(trace_of_snapshot, addresses_become_ids_and_streams_become_numbers) {
  using enum trace_action;
  allocator_snapshot taken;
  taken.device_traces = {{entry(alloc, 0x1000, 512)},
                         {entry(segment_alloc, 0x2000, 4096), entry(alloc, 0x2000, 100, 0xb0),
                          entry(alloc, 0x3000, 200), entry(free_requested, 0x2000, 100, 0xb0),
                          entry(free_completed, 0x2000, 100, 0xb0), entry(alloc, 0x2000, 300, 0xa0),
                          entry(trace_action::snapshot, 0, 0), entry(alloc, 0x4000, 400, 0xb0),
                          entry(free_requested, 0x3000, 200)}};
  const auto trace = parse_trace(taken, "s.pickle");
  EXPECT_THAT(trace.events, ElementsAre(allocate(0, 100, 1), allocate(1, 200), free(0), freed(0),
                                        allocate(2, 300, 2), allocate(3, 400, 1), free(1)));
  EXPECT_EQ(trace.streams, 3u);
  EXPECT_EQ(trace.peak_bytes, 900u);
  EXPECT_EQ(trace.source, "s.pickle");
}

TEST(trace_of_snapshot, histories_without_requests_and_without_completions) {
  using enum trace_action;
  allocator_snapshot taken;
  taken.device_traces = {{entry(alloc, 0x1000, 1), entry(free_completed, 0x1000, 1),
                          entry(alloc, 0x1000, 2), entry(free_requested, 0x1000, 2),
                          entry(alloc, 0x1000, 3)}};
  EXPECT_THAT(parse_trace(taken, "s").events, ElementsAre(allocate(0, 1), free(0), freed(0),
                                                          allocate(1, 2), free(1), allocate(2, 3)));
}

TEST(trace_of_snapshot, frees_of_the_time_before_are_left_out) {
  using enum trace_action;
  allocator_snapshot taken;
  taken.device_traces = {{entry(free_requested, 0x1000, 1), entry(free_completed, 0x1000, 1),
                          entry(free_completed, 0x2000, 1), entry(alloc, 0x1000, 2),
                          entry(free_requested, 0x3000, 1), entry(free_requested, 0x1000, 2)}};
  const auto trace = parse_trace(taken, "s");
  EXPECT_THAT(trace.events, ElementsAre(allocate(0, 2), free(0)));
  EXPECT_EQ(trace.unknown_frees, 3u);
}

TEST(trace_of_snapshot, what_cannot_be_is_refused) {
  using enum trace_action;
  EXPECT_THROW(parse_trace(allocator_snapshot{}, "s"), invalid_argument);
  const auto refused = [](std::vector<trace_entry> entries) -> std::string {
    allocator_snapshot taken;
    taken.device_traces = {std::move(entries)};
    try {
      parse_trace(taken, "s.pickle");
    } catch (const invalid_argument& refusal) {
      return refusal.message();
    }
    return "accepted";
  };
  EXPECT_THAT(refused({entry(alloc, 0x1000, 1), entry(alloc, 0x1000, 1)}),
              AllOf(HasSubstr("s.pickle: entry 1"), HasSubstr("1 bytes at 0x1000 are allocated")));
  EXPECT_THAT(refused({entry(alloc, 0x1000, 0x200), entry(alloc, 0x11ff, 8)}),
              HasSubstr("8 bytes at 0x11ff are allocated, but 512 bytes at 0x1000 were not freed"));
  EXPECT_THAT(refused({entry(alloc, 0x1100, 8), entry(alloc, 0x1000, 0x200)}),
              HasSubstr("512 bytes at 0x1000 are allocated, but 8 bytes at 0x1100 were not freed"));
  EXPECT_EQ(refused({entry(alloc, 0x1000, 0x200), entry(alloc, 0x1200, 8), entry(alloc, 0xff8, 8),
                     entry(free_requested, 0x1000, 0x200), entry(alloc, 0x1100, 0x100)}),
            "accepted")
      << "neighbours, and what is free again";
  EXPECT_THAT(refused({entry(alloc, 0x1000, 1), entry(free_requested, 0x1000, 1),
                       entry(free_requested, 0x1000, 1)}),
              AllOf(HasSubstr("s.pickle: entry 2"), HasSubstr("0x1000 was freed before")));
  EXPECT_THAT(refused({entry(alloc, 0x1000, 0)}), HasSubstr("an allocation of 0 bytes"));
}

// --- recorded ones ----------------------------------------------------------------------------

TEST(trace_file, the_recorded_ones_are_read) {
  const auto paths = test::recorded_traces();
  if (paths.empty()) GTEST_SKIP() << "no recorded traces (EVMM_TRACES, shared/traces)";
  struct known {
    std::size_t allocations, events;
    unsigned streams;
  };
  const std::map<std::string, known> expected = {
      {"ep_buffers", {34654, 34654 * 2 + 34652, 2}},
      {"llama_train_varlen", {37279, 37279 + 37277 * 2, 1}},
      {"mixtral_train", {26855, 26855 + 26853 * 2, 1}},
      {"transformer_step_ctx128", {6770, 6770 + 5894 * 2, 1}},
      {"transformer_train_ctx1024", {7591, 7591 + 6932 * 2, 1}}};
  for (const auto& path : paths) {
    const auto trace = read_trace(path);
    EXPECT_GT(trace.allocations, 0u) << path;
    const auto told = expected.find(test::trace_name(path));
    if (told == expected.end()) continue;
    EXPECT_EQ(trace.allocations, told->second.allocations) << path;
    EXPECT_EQ(trace.events.size(), told->second.events) << path;
    EXPECT_EQ(trace.streams, told->second.streams) << path;
  }
}

}  // namespace
}  // namespace evmm
