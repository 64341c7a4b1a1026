// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/allocator/block.hpp"
#include "lib/allocator/event_pool.hpp"

#include <evmm/driver.hpp>

#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Blocks of one arena that were freed while other streams may still use them.
///
/// Outside of graph captures each such stream gets an event; events of one stream are over in
/// their order, so the oldest of each is asked. During a capture no event can be recorded: the
/// block waits for the captures to end, or until the capture's own dependencies prove that the
/// requesting stream comes after all its users.
///
/// Threads: under the arena's lock.
class deferred_frees {
 public:
  /// The block comes back when every stream in block->other_streams is past what it has enqueued.
  void add(block* freed, event_pool& events);
  /// The same for a block that is freed during a capture. `last_nodes` are what its users did
  /// last in the capture; empty when its reuse cannot be proved.
  void add_captured(block* freed, std::vector<graph_node> last_nodes);

  /// Calls `back(block*)` for each block whose streams are past it.
  template <class Back>
  void poll(driver& on, Back&& back) {
    for (auto at = queues_.begin(); at != queues_.end();) {
      auto& queue = at->second;
      while (!queue.empty() && on.done(queue.front().event.get())) {
        block* const freed = queue.front().what;
        queue.pop_front();
        if (--freed->pending_events == 0) back(freed);
      }
      at = queue.empty() ? queues_.erase(at) : std::next(at);
    }
  }
  /// The event that was recorded first; null when none is waited for.
  const event_pool::lease* oldest() const noexcept;
  /// Calls `back` for the blocks of captures whose users all lie before `frontier`, the last
  /// nodes of the requesting stream.
  template <class Back>
  void poll_captured(const driver& on, const std::vector<graph_node>& frontier, Back&& back) {
    if (captured_.empty()) return;
    for (block* freed : take_proved(on, frontier)) back(freed);
  }
  /// Blocks that waited for captures to end get their events, but those that are `in_capture`.
  void captures_ended(event_pool& events, const std::function<bool(const block&)>& in_capture);

  bool empty() const noexcept { return queues_.empty() && captured_.empty(); }

 private:
  struct waiting {
    event_pool::lease event;
    block* what;
  };
  struct captured_free {
    block* what;
    std::vector<graph_node> last_nodes;
  };
  std::vector<block*> take_proved(const driver& on, const std::vector<graph_node>& frontier);

  std::map<native_stream, std::deque<waiting>> queues_;
  std::vector<captured_free> captured_;
};

}  // namespace evmm
