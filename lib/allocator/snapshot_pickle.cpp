// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pickle.hpp"
#include "lib/allocator/snapshot_tree.hpp"

#include <evmm/allocator/snapshot.hpp>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <vector>

namespace evmm {

namespace {

std::size_t mix(std::size_t hash, std::size_t value) {
  return (hash ^ value) * 0x9e3779b97f4a7c15u + (hash >> 29);
}

/// Of the length and the last bytes, where names and paths differ most: stacks are deep, and most
/// of those met were met before.
std::size_t quick_hash(std::string_view text) {
  std::uint64_t tail = 0;
  const std::size_t count = std::min(text.size(), sizeof tail);
  std::memcpy(&tail, text.data() + text.size() - count, count);
  return mix(text.size(), tail);
}

struct frame_hash {
  std::size_t operator()(const stack_frame* frame) const {
    return mix(mix(quick_hash(frame->name), quick_hash(frame->filename)), frame->line);
  }
};
using stack = std::vector<stack_frame>;
struct stack_hash {
  std::size_t operator()(const stack* frames) const {
    std::size_t hash = frames->size();
    for (const stack_frame& frame : *frames) hash = mix(hash, frame_hash{}(&frame));
    return hash;
  }
};
struct same_content {
  template <class T>
  bool operator()(const T* left, const T* right) const {
    return *left == *right;
  }
};

/// Stacks, and frames of different stacks, are written once.
class snapshot_writer : public pickle_writer {
 public:
  void frames(const stack& frames) {
    if (frames.empty()) return list(frames, [](const stack_frame&) {});
    if (const auto known = stacks_.find(&frames); known != stacks_.end()) {
      return again(known->second);
    }
    list(frames, [this](const stack_frame& frame) { write(frame); });
    stacks_.emplace(&frames, share());
  }

 private:
  void write(const stack_frame& frame) {
    if (const auto known = frames_.find(&frame); known != frames_.end()) {
      return again(known->second);
    }
    dict([&] {
      key("name");
      text(frame.name);
      key("filename");
      text(frame.filename);
      key("line");
      integer(std::uint64_t{frame.line});
    });
    frames_.emplace(&frame, share());
  }

  std::unordered_map<const stack*, std::uint32_t, stack_hash, same_content> stacks_;
  std::unordered_map<const stack_frame*, std::uint32_t, frame_hash, same_content> frames_;
};

}  // namespace

std::string to_pickle(const allocator_snapshot& snapshot) {
  snapshot_writer writer;
  snapshot_tree(writer).write(snapshot);
  return std::move(writer).finish();
}

}  // namespace evmm
