// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/pinned_marks.hpp"

#include <utility>

namespace evmm::pinned {

void mark_table::add(const std::vector<stream_use>& streams, const std::vector<mark>& marks) {
  std::size_t added = 0;
  try {
    for (; added < streams.size(); ++added) queues_[streams[added]].push_back(marks[added]);
  } catch (...) {
    while (added-- > 0) queues_[streams[added]].pop_back();
    throw;
  }
  waiting_ += added;
}

void mark_table::heads(std::vector<head>& out) const {
  out.clear();
  for (const auto& [stream, queue] : queues_) {
    if (!queue.empty()) out.push_back({stream, queue.front()});
  }
}

void mark_table::set_event(const stream_use& stream, native_event event) {
  queues_.at(stream).front().event = event;
}

mark mark_table::pop(const stream_use& stream) noexcept {
  const auto queue = queues_.find(stream);
  const mark first = queue->second.front();
  queue->second.pop_front();
  // A stream that comes and goes leaves nothing behind.
  if (queue->second.empty()) queues_.erase(queue);
  --waiting_;
  if (first.event != nullptr) spare(stream.first, first.event);
  return first;
}

native_event mark_table::reuse(device_id device) noexcept {
  const auto found = pools_.find(device);
  if (found == pools_.end() || found->second.spare.empty()) return nullptr;
  const native_event event = found->second.spare.back();
  found->second.spare.pop_back();
  return event;
}

void mark_table::made(device_id device) {
  pool& of = pools_[device];
  of.spare.reserve(of.made + 1);
  ++of.made;
}

void mark_table::spare(device_id device, native_event event) noexcept {
  pools_.find(device)->second.spare.push_back(event);  // made() saw to the room
}

void mark_table::drain(std::vector<native_event>& out) {
  for (auto& [device, of] : pools_) {
    out.insert(out.end(), of.spare.begin(), of.spare.end());
    of.spare.clear();
    of.made = 0;
  }
}

}  // namespace evmm::pinned
