// SPDX-License-Identifier: Apache-2.0
#include "comm/heap/heap_uses.hpp"

#include <algorithm>
#include <iterator>
#include <utility>

namespace evmm {

void heap_uses::add(std::size_t at, std::size_t bytes, std::span<const native_stream> streams) {
  if (pieces_.size() >= swept_at_) forget_what_is_over();
  piece used{bytes, {}};
  for (const native_stream stream : streams) {
    used.marks.push_back(
        {stream, ++order_, std::make_shared<const event_pool::lease>(events_.record(stream))});
  }
  forget(at, bytes);
  pieces_.insert_or_assign(at, std::move(used));
}

heap_uses::pieces::const_iterator heap_uses::first_touching(std::size_t from) const {
  auto at = pieces_.upper_bound(from);
  if (at != pieces_.begin()) {
    const auto before = std::prev(at);
    if (before->first + before->second.bytes > from) at = before;
  }
  return at;
}

std::vector<heap_uses::mark> heap_uses::last_marks(std::size_t from, std::size_t to) const {
  std::vector<mark> last;
  for (auto at = first_touching(from); at != pieces_.end() && at->first < to; ++at) {
    for (const mark& one : at->second.marks) {
      const auto same = std::find_if(last.begin(), last.end(),
                                     [&](const mark& of) { return of.stream == one.stream; });
      if (same == last.end()) {
        last.push_back(one);
      } else if (same->order < one.order) {
        *same = one;
      }
    }
  }
  return last;
}

void heap_uses::hand_over(std::size_t at, std::size_t bytes, native_stream to) {
  for (const mark& before : last_marks(at, at + bytes)) {
    if (before.stream != to) on_->wait(to, before.event->get());
  }
}

void heap_uses::forget(std::size_t at, std::size_t bytes) {
  const std::size_t end = at + bytes;
  for (auto found = first_touching(at); found != pieces_.end() && found->first < end;) {
    const std::size_t from = found->first;
    const std::size_t to = from + found->second.bytes;
    piece old = std::move(pieces_.extract(found++).mapped());
    if (to > end) pieces_.insert_or_assign(end, piece{to - end, old.marks});
    if (from < at) pieces_.insert_or_assign(from, piece{at - from, std::move(old.marks)});
  }
}

std::vector<native_event> heap_uses::events(std::size_t from, std::size_t to) const {
  std::vector<native_event> all;
  for (const mark& one : last_marks(from, to)) all.push_back(one.event->get());
  return all;
}

void heap_uses::forget_what_is_over() {
  std::erase_if(pieces_, [&](const auto& entry) {
    return std::all_of(entry.second.marks.begin(), entry.second.marks.end(),
                       [&](const mark& one) { return on_->done(one.event->get()); });
  });
  swept_at_ = std::max<std::size_t>(1024, 2 * pieces_.size());
}

}  // namespace evmm
