// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/deferred_frees.hpp"

#include <algorithm>
#include <unordered_set>
#include <utility>

namespace evmm {

void deferred_frees::add(block* freed, event_pool& events) {
  std::vector<std::deque<waiting>*> queues;
  std::vector<event_pool::lease> leases;
  for (native_stream stream : *freed->other_streams) {
    leases.push_back(events.record(stream));
    queues.push_back(&queues_[stream]);
  }
  std::size_t queued = 0;
  try {
    for (; queued < leases.size(); ++queued) {
      queues[queued]->push_back({std::move(leases[queued]), freed});
    }
  } catch (...) {
    while (queued > 0) queues[--queued]->pop_back();
    throw;
  }
  freed->pending_events = static_cast<std::uint32_t>(leases.size());
}

void deferred_frees::add_captured(block* freed, std::vector<graph_node> last_nodes) {
  captured_.push_back({freed, std::move(last_nodes)});
}

const event_pool::lease* deferred_frees::oldest() const noexcept {
  const event_pool::lease* found = nullptr;
  for (const auto& [stream, queue] : queues_) {
    if (queue.empty()) continue;
    const event_pool::lease& first = queue.front().event;
    if (found == nullptr || first.order() < found->order()) found = &first;
  }
  return found;
}

std::vector<block*> deferred_frees::take_proved(const driver& on,
                                                const std::vector<graph_node>& frontier) {
  const auto key = [](graph_node node) { return static_cast<std::uint64_t>(node); };
  std::unordered_set<std::uint64_t> before;
  std::vector<graph_node> open = frontier;
  while (!open.empty()) {
    const graph_node node = open.back();
    open.pop_back();
    if (!before.insert(key(node)).second) continue;
    for (graph_node earlier : on.graph_dependencies(node)) open.push_back(earlier);
  }
  std::vector<block*> proved;
  proved.reserve(captured_.size());
  std::erase_if(captured_, [&](const captured_free& one) {
    const bool safe = !one.last_nodes.empty() &&
                      std::all_of(one.last_nodes.begin(), one.last_nodes.end(),
                                  [&](graph_node node) { return before.contains(key(node)); });
    if (safe) proved.push_back(one.what);
    return safe;
  });
  return proved;
}

void deferred_frees::captures_ended(event_pool& events,
                                    const std::function<bool(const block&)>& in_capture) {
  for (std::size_t i = captured_.size(); i-- > 0;) {
    if (in_capture(*captured_[i].what)) continue;
    add(captured_[i].what, events);
    std::swap(captured_[i], captured_.back());
    captured_.pop_back();
  }
}

}  // namespace evmm
