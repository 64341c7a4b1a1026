// SPDX-License-Identifier: Apache-2.0
#include <evmm/allocator/snapshot.hpp>
#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <limits>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm {
namespace {

using namespace evmm::units;
using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::StartsWith;

std::vector<stack_frame> some_frames() {
  return {{"step", "/home/me/train.py", 42}, {"main", "/home/me/train.py", 7}, {"_start", "??", 0}};
}

native_stream stream_at(std::uintptr_t value) {
  return reinterpret_cast<native_stream>(value);  // NOLINT: never used as a stream
}

/// One of everything.
allocator_snapshot sample() {
  constexpr address base = 0x7f12a4000000;
  allocator_snapshot snapshot;
  snapshot.segments.push_back({.device = 0,
                               .at = base,
                               .total_bytes = 20_MiB,
                               .allocated_bytes = 2_MiB,
                               .active_bytes = 3_MiB,
                               .requested_bytes = 2000000,
                               .stream = nullptr,
                               .large = true,
                               .pool = {0, 1},
                               .expandable = true,
                               .where = tier::device,
                               .frames = some_frames(),
                               .blocks = {{.at = base,
                                           .bytes = 2_MiB,
                                           .requested_bytes = 2000000,
                                           .state = block_state::active_allocated,
                                           .frames = some_frames()},
                                          {.at = base + 2_MiB,
                                           .bytes = 1_MiB,
                                           .requested_bytes = 5,
                                           .state = block_state::active_pending_free},
                                          {.at = base + 3_MiB, .bytes = 17_MiB}}});
  snapshot.segments.push_back({.device = 1,
                               .at = 0x10000,
                               .total_bytes = 2_MiB,
                               .stream = stream_at(0xfedcba9876543210),
                               .where = tier::host,
                               .frames = {},
                               .blocks = {{.at = 0x10000, .bytes = 2_MiB}}});
  snapshot.device_traces.resize(3);
  std::int64_t time = 1767225600000000;
  for (const trace_action action :
       {trace_action::alloc, trace_action::free_requested, trace_action::free_completed,
        trace_action::segment_alloc, trace_action::segment_free, trace_action::segment_map,
        trace_action::segment_unmap, trace_action::snapshot, trace_action::oom,
        trace_action::annotate}) {
    snapshot.device_traces[0].push_back({.action = action,
                                         .device = 0,
                                         .at = base + 512,
                                         .bytes = 70000,
                                         .stream = stream_at(0x5581),
                                         .time_us = time++,
                                         .pool = {0, 300},
                                         .compile_context = "N/A",
                                         .user_metadata = "layer \"3\"\n\xc3\xa9",
                                         .frames = {}});
  }
  snapshot.device_traces[0].front().frames = some_frames();
  snapshot.device_traces[2].push_back({.device = 2,
                                       .at = std::numeric_limits<std::size_t>::max(),
                                       .bytes = 1_TiB,
                                       .time_us = -1,
                                       .frames = {{"step", "/home/me/train.py", 4294967295u}}});
  snapshot.external_annotations.push_back({1, time, {{"name", "epoch"}, {"stage", "START"}}});
  snapshot.settings = {{"PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:128"},
                       {"max_split_size", "134217728"},
                       {"garbage_collection_threshold", "0.8"},
                       {"expandable_segments", "True"},
                       {"pinned_num_register_threads", "8"},
                       {"release_lock_on_cudamalloc", "False"},
                       {"roundup_power2_divisions", "[1:0,2:4,4:-1]"},
                       {"recycle_handles", "ready"}};
  return snapshot;
}

std::string refusal(std::string_view bytes) {
  try {
    from_pickle(bytes);
  } catch (const invalid_argument& failure) {
    EXPECT_FALSE(failure.help().empty());
    return failure.what();
  }
  ADD_FAILURE() << "taken";
  return "";
}

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

/// Events of a training loop: 200 stacks of 30 frames.
allocator_snapshot large_snapshot(std::size_t events) {
  allocator_snapshot snapshot;
  std::vector<std::vector<stack_frame>> stacks(200);
  for (std::size_t i = 0; i < stacks.size(); ++i) {
    for (std::uint32_t depth = 0; depth < 30; ++depth) {
      const std::string number = std::to_string(depth < 5 ? i : depth);
      stacks[i].push_back({"at::native::some_rather_long_name_of_a_function_" + number,
                           "/opt/conda/lib/python3.11/site-packages/torch/nn/module_" + number,
                           depth});
    }
  }
  auto& trace = snapshot.device_traces.emplace_back();
  for (std::size_t i = 0; i < events; ++i) {
    trace.push_back({.action = i % 2 == 0 ? trace_action::alloc : trace_action::free_completed,
                     .at = 0x7f12a4000000 + 512 * (i % 5000),
                     .bytes = 512 * (i % 100),
                     .time_us = 1767225600000000 + static_cast<std::int64_t>(i),
                     .compile_context = "N/A",
                     .frames = stacks[i % stacks.size()]});
  }
  return snapshot;
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

// --- with Python --------------------------------------------------------------------------------

/// A folder of its own, gone with the test, in which Python runs.
class snapshot_in_python : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = ::testing::TempDir() + "/evmm_snapshot_XXXXXX";
    ASSERT_NE(::mkdtemp(name.data()), nullptr);
    folder_ = name;
    if (run("import pickle").first != 0) GTEST_SKIP() << "no python3 here";
  }
  void TearDown() override {
    std::error_code ignored;
    std::filesystem::remove_all(folder_, ignored);
  }

  void write(const char* name, const std::string& bytes) const {
    std::ofstream(folder_ / name, std::ios::binary) << bytes;
  }
  std::string read(const std::string& name) const {
    std::ifstream file(folder_ / name, std::ios::binary);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  /// Exit code and output of the program, run in the folder.
  std::pair<int, std::string> run(const std::string& program) const {
    write("program.py", program);
    const std::string command = "cd '" + folder_.string() + "' && python3 program.py 2>&1";
    std::FILE* pipe = ::popen(command.c_str(), "r");  // NOLINT: the command is ours
    if (pipe == nullptr) return {-1, "popen"};
    std::string output;
    std::array<char, 4096> part{};
    while (const std::size_t count = std::fread(part.data(), 1, part.size(), pipe)) {
      output.append(part.data(), count);
    }
    const int status = ::pclose(pipe);
    return {WIFEXITED(status) ? WEXITSTATUS(status) : -1, output};
  }

 private:
  std::filesystem::path folder_;
};

TEST_F(snapshot_in_python, a_pickle_has_the_structure_of_pytorchs) {
  write("snapshot.pickle", to_pickle(sample()));
  write("snapshot.json", to_json(sample()));
  const auto [code, output] = run(R"(
import json, pickle, pickletools
data = pickle.load(open('snapshot.pickle', 'rb'))
assert list(data) == ['segments', 'device_traces', 'allocator_settings', 'external_annotations']

segment, host = data['segments']
keys = ['device', 'address', 'total_size', 'allocated_size', 'active_size', 'requested_size',
        'stream', 'segment_type', 'segment_pool_id', 'is_expandable', 'frames', 'blocks']
assert list(segment) == keys, list(segment)
assert set(host) == set(keys) | {'tier'} and host['tier'] == 'host'
assert segment['address'] == 0x7f12a4000000 and segment['total_size'] == 20 << 20
assert segment['segment_type'] == 'large' and host['segment_type'] == 'small'
assert segment['segment_pool_id'] == (0, 1) and type(segment['segment_pool_id']) is tuple
assert segment['is_expandable'] is True and host['is_expandable'] is False
assert host['stream'] == 0xfedcba9876543210
blocks = segment['blocks']
assert all(list(b) == ['address', 'size', 'requested_size', 'state', 'frames'] for b in blocks)
assert [b['state'] for b in blocks] == ['active_allocated', 'active_pending_free', 'inactive']
assert sum(b['size'] for b in blocks) == segment['total_size']
frames = blocks[0]['frames']
assert frames[0] == {'name': 'step', 'filename': '/home/me/train.py', 'line': 42}
assert frames is segment['frames'] and blocks[1]['frames'] == []

trace, empty, other = data['device_traces']
assert [e['action'] for e in trace] == [
    'alloc', 'free_requested', 'free_completed', 'segment_alloc', 'segment_free', 'segment_map',
    'segment_unmap', 'snapshot', 'oom', 'annotate']
for e in trace:
    where = 'device_free' if e['action'] == 'oom' else 'addr'
    assert list(e)[:8] == ['action', where, 'size', 'stream', 'compile_context', 'user_metadata',
                           'time_us', 'pool_id'], list(e)
    assert e['user_metadata'] == 'layer "3"\n\u00e9' and e['pool_id'] == (0, 300)
assert 'frames' in trace[0] and 'frames' not in trace[1]
assert empty == [] and other[0]['time_us'] == -1 and other[0]['addr'] == 2**64 - 1

settings = data['allocator_settings']
assert settings['max_split_size'] == 134217728 and settings['expandable_segments'] is True
assert settings['garbage_collection_threshold'] == 0.8
assert settings['roundup_power2_divisions'] == {'1': 0, '2': 4, '4': -1}
assert settings['recycle_handles'] == 'ready'
assert list(data['external_annotations'][0].items())[:3] == [
    ('name', 'epoch'), ('stage', 'START'), ('device', 1)]

# What the memory viewer's own reader knows.
known = set('''PROTO STOP MARK EMPTY_DICT EMPTY_LIST TUPLE2 APPENDS SETITEMS BININT BININT1 BININT2
               LONG1 BINFLOAT BINUNICODE NEWTRUE NEWFALSE BINPUT LONG_BINPUT BINGET
               LONG_BINGET'''.split())
used = {op.name for op, _, _ in pickletools.genops(open('snapshot.pickle', 'rb').read())}
assert used <= known, used - known

def plain(tree):
    if isinstance(tree, dict): return {k: plain(v) for k, v in tree.items()}
    return [plain(v) for v in tree] if isinstance(tree, (list, tuple)) else tree
assert json.load(open('snapshot.json')) == plain(data)
)");
  EXPECT_EQ(code, 0) << output;
}

TEST_F(snapshot_in_python, large_pickles_come_in_batches) {
  write("snapshot.pickle", to_pickle(large_snapshot(2500)));
  const auto [code, output] = run(R"(
import pickle, pickletools
data = pickle.load(open('snapshot.pickle', 'rb'))
assert len(data['device_traces'][0]) == 2500
assert all(len(e['frames']) == 30 for e in data['device_traces'][0])
marks, longest = [], 0
# The memory viewer passes a batch as arguments of one call.
for op, _, _ in pickletools.genops(open('snapshot.pickle', 'rb').read()):
    if op.name == 'MARK': marks.append(0)
    elif op.name in ('APPENDS', 'SETITEMS'):
        longest = max(longest, marks.pop())
        if marks: marks[-1] += 1
assert longest <= 1000, longest
)");
  EXPECT_EQ(code, 0) << output;
}

TEST_F(snapshot_in_python, pickles_of_every_protocol_are_read) {
  const auto [code, output] = run(R"(
import pickle
frames = [{'name': 'f' * 300, 'filename': '\u00e9.py', 'line': 3, 'fx_node_op': 'call'},
          {'name': 'g', 'filename': '', 'line': -1}]
data = {
    'segments': [
        {'device': 1, 'address': 140000000000000, 'total_size': 2097152, 'allocated_size': 512,
         'active_size': 1024, 'requested_size': 300, 'stream': -2, 'segment_type': 'small',
         'segment_pool_id': (0, 7), 'is_expandable': False, 'frames': frames, 'extra': {1: None},
         'blocks': [
             {'address': 140000000000000, 'size': 512, 'requested_size': 300,
              'state': 'active_allocated', 'frames': frames},
             {'size': 512, 'requested_size': 0, 'state': 'active_awaiting_free'},
             {'size': 2096128, 'state': 'inactive', 'frames': [], 'history': [1.5, (1, 2, 3, 4)]}
         ]}],
    'device_traces': [[], [
        {'action': 'alloc', 'addr': 140000000000000, 'size': 512, 'stream': 0,
         'time_us': 1767225600000000, 'compile_context': None, 'user_metadata': '',
         'pool_id': (0, 0), 'frames': frames},
        {'action': 'oom', 'device_free': 2**40, 'size': 2**63, 'stream': 0, 'time_us': 0}]
        + [{'action': 'free_completed', 'addr': i, 'size': 70000 * i, 'stream': 0, 'time_us': -i}
           for i in range(3000)]],
    'allocator_settings': {
        'PYTORCH_CUDA_ALLOC_CONF': 'backend:native', 'max_split_size': -1,
        'garbage_collection_threshold': 0.25, 'expandable_segments': True,
        'roundup_power2_divisions': {'1': 0, '2': 8}, 'odd': [1, [2], None]},
    'external_annotations': [{'name': 'epoch', 'device': 1, 'time_us': 12}],
    'future': b'',
}
for protocol in range(2, 6):
    if protocol < 3: data.pop('future')
    pickle.dump(data, open(f'c{protocol}.pickle', 'wb'), protocol)
    open(f'python{protocol}.pickle', 'wb').write(pickle._dumps(data, protocol))
)");
  ASSERT_EQ(code, 0) << output;

  constexpr address base = 140000000000000;
  const std::vector<stack_frame> frames = {{std::string(300, 'f'), "\xc3\xa9.py", 3}, {"g", "", 0}};
  allocator_snapshot expected;
  expected.segments = {{.device = 1,
                        .at = base,
                        .total_bytes = 2_MiB,
                        .allocated_bytes = 512,
                        .active_bytes = 1024,
                        .requested_bytes = 300,
                        .stream = stream_at(std::uintptr_t{0} - 2),
                        .pool = {0, 7},
                        .frames = frames,
                        .blocks = {{base, 512, 300, block_state::active_allocated, frames},
                                   {base + 512, 512, 0, block_state::active_pending_free},
                                   {base + 1024, 2096128, 0, block_state::inactive}}}};
  expected.device_traces.resize(2);
  auto& trace = expected.device_traces[1];
  trace.push_back(
      {.device = 1, .at = base, .bytes = 512, .time_us = 1767225600000000, .frames = frames});
  trace.push_back(
      {.action = trace_action::oom, .device = 1, .at = 1_TiB, .bytes = std::size_t{1} << 63});
  for (std::size_t i = 0; i < 3000; ++i) {
    trace.push_back({.action = trace_action::free_completed,
                     .device = 1,
                     .at = i,
                     .bytes = 70000 * i,
                     .time_us = -static_cast<std::int64_t>(i)});
  }
  expected.settings = {
      {"PYTORCH_CUDA_ALLOC_CONF", "backend:native"}, {"max_split_size", "-1"},
      {"garbage_collection_threshold", "0.25"},      {"expandable_segments", "True"},
      {"roundup_power2_divisions", "[1:0,2:8]"},     {"odd", "[1,...,None]"}};
  expected.external_annotations = {{1, 12, {{"name", "epoch"}}}};
  for (const char* writer : {"c", "python"}) {
    for (int protocol = 2; protocol <= 5; ++protocol) {
      const std::string bytes = read(writer + std::to_string(protocol) + ".pickle");
      EXPECT_TRUE(from_pickle(bytes) == expected) << writer << protocol;
    }
  }
}

TEST_F(snapshot_in_python, pickles_that_call_functions_are_refused) {
  const auto [code, output] = run(R"(
import collections, pickle
data = {'segments': [], 'device_traces': [], 'when': collections.OrderedDict(a=1)}
for protocol in range(0, 6):
    pickle.dump(data, open(f'{protocol}.pickle', 'wb'), protocol)
)");
  ASSERT_EQ(code, 0) << output;
  EXPECT_THAT(refusal(read("0.pickle")), HasSubstr("byte 0: a pickle of protocol 2 or later"));
  EXPECT_THAT(refusal(read("1.pickle")), HasSubstr("byte 0: a pickle of protocol 2 or later"));
  EXPECT_THAT(refusal(read("2.pickle")), HasSubstr("the opcode GLOBAL, which could run any code"));
  EXPECT_THAT(refusal(read("3.pickle")), HasSubstr("the opcode GLOBAL"));
  EXPECT_THAT(refusal(read("4.pickle")), HasSubstr("the opcode STACK_GLOBAL"));
  EXPECT_THAT(refusal(read("5.pickle")), HasSubstr("the opcode STACK_GLOBAL"));
}

TEST_F(snapshot_in_python, pytorch_plots_it) {
  if (run("import torch.cuda._memory_viz").first != 0) GTEST_SKIP() << "no PyTorch here";
  write("snapshot.pickle", to_pickle(sample()));
  const auto [code, output] = run(R"(
import pickle
from torch.cuda import _memory_viz as viz
data = pickle.load(open('snapshot.pickle', 'rb'))
assert '<html>' in viz.trace_plot(data)
assert '<html>' in viz.segment_plot(data)
assert viz.segsum(data) and viz.trace(data)
)");
  EXPECT_EQ(code, 0) << output;
}

}  // namespace
}  // namespace evmm
