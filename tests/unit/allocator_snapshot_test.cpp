// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/history.hpp"
#include "tests/unit/sample_snapshots.hpp"

#include <evmm/allocator/snapshot.hpp>
#include <evmm/error.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <string_view>

namespace evmm {
namespace {

using namespace test;
using namespace evmm::units;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

// --- there and back -----------------------------------------------------------------------------

TEST(allocator_snapshot, comes_back_from_a_pickle) {
  EXPECT_EQ(from_pickle(to_pickle({})), allocator_snapshot{});
  EXPECT_EQ(from_pickle(to_pickle(sample())), sample());
  EXPECT_EQ(to_pickle(from_pickle(to_pickle(sample()))), to_pickle(sample()));
}

TEST(allocator_snapshot, integers_of_any_width_come_back) {
  for (int shift = 0; shift < 64; ++shift) {
    for (const int nudge : {-1, 0, 1}) {
      const auto value = (std::uint64_t{1} << shift) + static_cast<std::uint64_t>(nudge);
      allocator_snapshot snapshot;
      snapshot.device_traces = {{{.bytes = value, .time_us = static_cast<std::int64_t>(value)}}};
      ASSERT_EQ(from_pickle(to_pickle(snapshot)), snapshot) << value;
      snapshot.device_traces[0][0].time_us = -(snapshot.device_traces[0][0].time_us / 2);
      ASSERT_EQ(from_pickle(to_pickle(snapshot)), snapshot) << value;
    }
  }
}

TEST(allocator_snapshot, settings_that_cannot_be_typed_stay_text) {
  allocator_snapshot snapshot;
  snapshot.settings = {{"expandable_segments", "yes"},
                       {"max_split_size", "none"},
                       {"garbage_collection_threshold", "nan"},
                       {"roundup_power2_divisions", "[1:x]"},
                       {"graph_capture_record_stream_reuse", ""},
                       {"other", "[1:2]"}};
  EXPECT_EQ(from_pickle(to_pickle(snapshot)), snapshot);
  snapshot.settings = {{"roundup_power2_divisions", "[]"}};
  EXPECT_EQ(from_pickle(to_pickle(snapshot)), snapshot);
}

TEST(allocator_snapshot, text_that_is_not_utf8_is_mended) {
  allocator_snapshot snapshot;
  snapshot.settings = {{"name", "a\xff\xc3(\xed\xa0\x80z\xc3\xa9\xf0\x9f\x98\x80"}};
  const std::string mended =
      "a\xef\xbf\xbd\xef\xbf\xbd(\xef\xbf\xbd\xef\xbf\xbd\xef\xbf\xbdz\xc3\xa9\xf0\x9f\x98\x80";
  EXPECT_EQ(from_pickle(to_pickle(snapshot)).settings.front().second, mended);
  EXPECT_THAT(to_json(snapshot), HasSubstr(mended));
}

TEST(allocator_snapshot, json_is_the_same_tree) {
  EXPECT_EQ(to_json({}), R"({"segments":[],"device_traces":[],"allocator_settings":{},)"
                         R"("external_annotations":[]})");
  allocator_snapshot snapshot;
  snapshot.device_traces = {{{.action = trace_action::oom,
                              .at = 5,
                              .bytes = 7,
                              .time_us = 9,
                              .user_metadata = "\"\\\n\x01",
                              .frames = {{"f", "g.py", 3}}}}};
  snapshot.settings = {{"expandable_segments", "False"}, {"roundup_power2_divisions", "[1:2]"}};
  EXPECT_EQ(to_json(snapshot),
            R"({"segments":[],"device_traces":[[{"action":"oom","device_free":5,"size":7,)"
            R"("stream":0,"compile_context":"","user_metadata":"\"\\\u000a\u0001","time_us":9,)"
            R"("pool_id":[0,0],"frames":[{"name":"f","filename":"g.py","line":3}]}]],)"
            R"("allocator_settings":{"expandable_segments":false,)"
            R"("roundup_power2_divisions":{"1":2}},"external_annotations":[]})");
}

TEST(allocator_snapshot, repeated_texts_and_stacks_are_written_once) {
  const allocator_snapshot snapshot = large_snapshot(20000);
  const std::string bytes = to_pickle(snapshot);
  EXPECT_LT(bytes.size(), 80 * 20000u + 2000 * 200u);
  EXPECT_EQ(from_pickle(bytes), snapshot);
}

// --- refusals -----------------------------------------------------------------------------------

TEST(allocator_snapshot, a_pickle_cut_anywhere_is_refused) {
  const std::string bytes = to_pickle(sample());
  for (std::size_t length = 0; length < bytes.size(); ++length) {
    ASSERT_THAT(refusal(std::string_view(bytes).substr(0, length)),
                AllOf(HasSubstr("pickle, byte "), StartsWith("invalid_argument")));
  }
  // Python too takes no notice of what follows.
  EXPECT_EQ(from_pickle(bytes + std::string(3, '\0')), sample());
}

TEST(allocator_snapshot, damaged_pickles_are_read_or_refused) {
  const std::string good = to_pickle(sample());
  std::mt19937 random(11);
  const auto below = [&](std::size_t end) {
    return std::uniform_int_distribution<std::size_t>(0, end - 1)(random);
  };
  for (int i = 0; i < 5000; ++i) {
    std::string bytes = good;
    for (std::size_t n = 1 + below(4); n > 0; --n) {
      bytes[below(bytes.size())] = static_cast<char>(below(256));
    }
    try {
      from_pickle(bytes);
    } catch (const invalid_argument&) {
      // Any other exception fails the test.
    }
  }
}

TEST(allocator_snapshot, errors_name_the_byte) {
  using namespace std::string_view_literals;
  struct bad_pickle {
    std::string_view bytes;
    const char* says;
  };
  const bad_pickle cases[] = {
      {""sv, "byte 0: it is empty"},
      {"\x80"sv, "byte 1: it ends"},
      {"}."sv, "byte 0: a pickle of protocol 2"},
      {"\x80\x01}."sv, "byte 1: protocol 1"},
      {"\x80\x06}."sv, "byte 1: protocol 6"},
      {"\x80\x02."sv, "byte 2: it stops"},
      {"\x80\x02}}."sv, "byte 4: it stops"},
      {"\x80\x02(}."sv, "byte 4: it stops"},
      {"\x80\x02N."sv, "byte 2: a snapshot is None, not a dict"},
      {"\x80\x02}."sv, "byte 2: a snapshot without 'segments'"},
      {"\x80\x02}X\x08\0\0\0segments]s."sv, "byte 2: a snapshot without 'device_traces'"},
      {"\x80\x02}X\x08\0\0\0segmentsNs."sv, "byte 16: segments is None, not a list"},
      {"\x80\x02}X\x08\0\0\0segments](Nes."sv, "byte 18: a segment is None, not a dict"},
      {"\x80\x02}X\x08\0\0\0segments](}es."sv, "byte 18: a segment without 'address'"},
      {"\x80\x02}(Nu."sv, "byte 5: a dict with a key and no value"},
      {"\x80\x02}(Nd."sv, "byte 5: a dict with a key and no value"},
      {"\x80\x02Na."sv, "byte 3: an opcode without its values"},
      {"\x80\x02](a."sv, "byte 4: an opcode without its values"},
      {"\x80\x02Ne."sv, "byte 3: an opcode without its mark"},
      {"\x80\x02N(e."sv, "byte 4: an opcode that needs a list"},
      {"\x80\x02](NNNs."sv, "byte 7: an opcode that needs a dict"},
      {"\x80\x02\x86."sv, "byte 2: an opcode without its values"},
      {"\x80\x02h\0."sv, "byte 2: memo number 0"},
      {"\x80\x02Nr\xff\xff\xff\xff."sv, "byte 3: a memo number beyond"},
      {"\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\x01."sv, "byte 2: an integer of more than 64 bits"},
      {"\x80\x02\x8a\x09\0\0\0\0\0\0\0\0\xff."sv, "byte 2: an integer of more than 64 bits"},
      {"\x80\x02X\xff\xff\xff\xffz."sv, "byte 9: it ends within what starts at byte 2"},
      {"\x80\x02?."sv, "byte 2: the opcode 0x3f"},
      {"\x80\x02\x63os\nsystem\n."sv, "byte 2: the opcode GLOBAL, which could run any code"},
      {"\x80\x04\x93."sv, "byte 2: the opcode STACK_GLOBAL"},
      {"\x80\x02)R."sv, "byte 3: the opcode REDUCE"},
      {"\x80\x02)\x81."sv, "byte 3: the opcode NEWOBJ"},
      {"\x80\x02}b."sv, "byte 3: the opcode BUILD"},
  };
  for (const auto& [bytes, says] : cases) EXPECT_THAT(refusal(bytes), HasSubstr(says));
}

TEST(allocator_snapshot, names_that_it_does_not_know_are_told) {
  for (const std::string known : {"segment_free", "active_allocated", "small"}) {
    std::string bytes = to_pickle(sample());
    std::string unknown = known;
    unknown.back() = 'x';
    for (std::size_t at = 0; (at = bytes.find(known, at)) != std::string::npos;) {
      bytes.replace(at, known.size(), unknown);
    }
    EXPECT_THAT(refusal(bytes), HasSubstr("'" + unknown + "'"));
  }
}

// --- the history that fills it -------------------------------------------------------------------

TEST(allocator_history, nothing_is_wanted_once_the_last_listener_is_gone) {
  const history::event event{
      .action = trace_action::alloc, .at = 4096, .bytes = 512, .stream = nullptr, .pool = {}};
  history kept(device_id{0});
  int heard = 0;
  auto first = kept.listen([&](const trace_entry&) { ++heard; });
  auto second = kept.listen([&](const trace_entry&) { ++heard; });
  kept.record(event);
  EXPECT_EQ(heard, 2);
  first.reset();
  kept.record(event);
  EXPECT_EQ(heard, 3);
  EXPECT_TRUE(kept.wanted());
  second.reset();
  kept.record(event);
  EXPECT_FALSE(kept.wanted()) << "the hot path has to be hot again";
  second = kept.listen([&](const trace_entry&) { ++heard; });
  EXPECT_TRUE(kept.wanted());
}

}  // namespace
}  // namespace evmm
