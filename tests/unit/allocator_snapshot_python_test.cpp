// SPDX-License-Identifier: Apache-2.0
// Snapshots as Python and PyTorch read and write them.
#include "tests/unit/sample_snapshots.hpp"

#include <evmm/allocator/snapshot.hpp>
#include <evmm/units.hpp>

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

namespace evmm {
namespace {

using namespace test;
using namespace evmm::units;
using ::testing::HasSubstr;

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
        {'action': 'oom', 'device_free': 2**40, 'size': 2**63, 'stream': 0, 'time_us': 0},
        {'action': 'user_defined', 'addr': 0, 'size': 0, 'stream': 0, 'time_us': 7}]
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
  trace.push_back({.action = trace_action::annotate, .device = 1, .time_us = 7});
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
