// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/capture.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

namespace evmm::host {

namespace {
std::atomic<std::uint64_t> next_id = 1;
}  // namespace

capture_session::capture_session(native_stream origin)
    : id_(next_id.fetch_add(1, std::memory_order_relaxed)), origin_(origin) {
  frontiers_[origin];
}

void capture_session::invalidate() {
  if (status_ == capture_status::active) status_ = capture_status::invalidated;
}

void capture_session::check_active() const {
  if (status_ == capture_status::active) return;
  throw invalid_argument(
      fmt::format("capture {} {}", id_,
                  status_ == capture_status::none ? "has ended" : "was invalidated"),
      "end the capture and begin anew");
}

void capture_session::add(native_stream stream, work node) {
  check_active();
  nodes_.push_back(std::move(node));
  after_.push_back(std::exchange(frontiers_[stream], {nodes_.size() - 1}));
}

void capture_session::join(native_stream stream, const frontier& event) {
  check_active();
  frontier& own = frontiers_[stream];
  for (const auto node : event) {
    if (std::find(own.begin(), own.end(), node) == own.end()) own.push_back(node);
  }
}

const capture_session::frontier& capture_session::before(std::size_t node) const {
  if (node < after_.size()) return after_[node];
  throw invalid_argument(fmt::format("capture {} has no node {}", id_, node));
}

std::shared_ptr<const host_graph> capture_session::finish() {
  const auto was = std::exchange(status_, capture_status::none);
  if (was != capture_status::active) {
    throw invalid_argument(fmt::format("capture {} was invalidated", id_),
                           "do not synchronise or query a stream or event that is captured");
  }
  // Walk back from where the origin stands: whatever is not met was forked off and never joined.
  std::vector<bool> reached(nodes_.size(), false);
  for (const auto node : frontiers_[origin_]) reached[node] = true;
  for (std::size_t node = nodes_.size(); node-- > 0;) {
    if (!reached[node]) continue;
    for (const auto before : after_[node]) reached[before] = true;
  }
  if (const auto lost = std::count(reached.begin(), reached.end(), false); lost != 0) {
    throw invalid_argument(
        fmt::format("capture {} ends with {} pieces of work that do not lead back to its stream",
                    id_, lost),
        "record an event after the work of each forked stream and let the origin wait for it");
  }
  auto graph = std::make_shared<host_graph>();
  graph->nodes = std::move(nodes_);
  return graph;
}

}  // namespace evmm::host
