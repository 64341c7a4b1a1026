// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/host/stream_table.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <utility>

namespace evmm::host {

// Streams and events are names, not objects: a name is never used twice, so that a stream which
// was destroyed is found out instead of being taken for a new one.
std::uintptr_t stream_table::next_name() {
  return next_name_ += 0x10;
}

stream_table::stream_state& stream_table::find(native_stream stream) {
  // The default stream is there for whoever asks first.
  if (stream == nullptr) return streams_.try_emplace(nullptr).first->second;
  const auto found = streams_.find(stream);
  if (found == streams_.end()) {
    throw invalid_argument(
        fmt::format("stream {} does not exist, or was destroyed", static_cast<void*>(stream)));
  }
  return found->second;
}

stream_table::event_state& stream_table::find(native_event event) {
  const auto found = events_.find(event);
  if (found == events_.end()) {
    throw invalid_argument(
        fmt::format("event {} does not exist, or was destroyed", static_cast<void*>(event)));
  }
  return found->second;
}

void stream_table::check_not_captured(stream_state& stream, const char* doing) {
  if (!stream.capturing) return;
  stream.capturing->invalidate();
  throw invalid_argument(
      fmt::format("cannot {} a stream that is being captured; capture {} is "
                  "invalidated",
                  doing, stream.capturing->id()));
}

void stream_table::check_not_captured(event_state& event, const char* doing) {
  if (!event.recorded_in) return;
  event.recorded_in->invalidate();
  throw invalid_argument(fmt::format("cannot {} an event that was last recorded in capture {}",
                                     doing, event.recorded_in->id()),
                         "record it outside of a capture first");
}

void stream_table::reap() {
  std::erase_if(closing_, [](const auto& queue) { return queue->ended(); });
}

native_stream stream_table::create_stream(device_id device) {
  stream_state made{device};
  const std::lock_guard lock(mutex_);
  reap();
  const auto name = reinterpret_cast<native_stream>(next_name());
  streams_.emplace(name, std::move(made));
  return name;
}

void stream_table::destroy_stream(native_stream stream) {
  const std::lock_guard lock(mutex_);
  if (stream == nullptr) throw invalid_argument("the default stream cannot be destroyed");
  auto& state = find(stream);
  if (state.capturing && state.capturing->origin() == stream) {
    state.capturing->invalidate();
    end(session(state.capturing));
  }
  reap();
  closing_.push_back(state.queue);
  state.queue->close();
  streams_.erase(stream);
}

void stream_table::synchronize(native_stream stream) {
  std::shared_ptr<worker> queue;
  {
    const std::lock_guard lock(mutex_);
    auto& state = find(stream);
    check_not_captured(state, "synchronise");
    queue = state.queue;
  }
  queue->synchronize();
}

bool stream_table::idle(native_stream stream) {
  const std::lock_guard lock(mutex_);
  auto& state = find(stream);
  check_not_captured(state, "query");
  return state.queue->idle();
}

void stream_table::enqueue(native_stream stream, work next) {
  const std::lock_guard lock(mutex_);
  auto& state = find(stream);
  if (state.capturing) {
    state.capturing->add(stream, std::move(next));
  } else {
    state.queue->push(std::move(next));
  }
}

native_event stream_table::create_event(device_id device) {
  const std::lock_guard lock(mutex_);
  const auto name = reinterpret_cast<native_event>(next_name());
  events_.emplace(name, event_state{device});
  return name;
}

void stream_table::destroy_event(native_event event) {
  const std::lock_guard lock(mutex_);
  static_cast<void>(find(event));
  events_.erase(event);
}

void stream_table::record(native_event event, native_stream stream) {
  const std::lock_guard lock(mutex_);
  auto& state = find(stream);
  auto& recorded = find(event);
  // The default stream is the current device's, whichever that is.
  if (stream != nullptr && state.device != recorded.device) {
    throw invalid_argument(
        fmt::format("cannot record an event of device {} on a stream of device {}",
                    recorded.device.value, state.device.value),
        "create the event on the stream's device");
  }
  if (state.capturing) {
    state.capturing->check_active();
    recorded.frontier = state.capturing->of(stream);
    recorded.recorded_in = state.capturing;
    return;
  }
  auto reached = std::make_shared<completion>();
  state.queue->push([reached] { reached->set(); });
  recorded.latest = std::move(reached);
  recorded.recorded_in = nullptr;
}

bool stream_table::done(native_event event) {
  const std::lock_guard lock(mutex_);
  auto& state = find(event);
  check_not_captured(state, "query");
  return !state.latest || state.latest->reached();
}

void stream_table::synchronize(native_event event) {
  std::shared_ptr<completion> latest;
  {
    const std::lock_guard lock(mutex_);
    auto& state = find(event);
    check_not_captured(state, "synchronise");
    latest = state.latest;
  }
  if (latest) latest->wait();
}

void stream_table::wait(native_stream stream, native_event event) {
  const std::lock_guard lock(mutex_);
  auto& state = find(stream);
  auto& awaited = find(event);
  if (awaited.recorded_in) {
    awaited.recorded_in->check_active();
    if (stream == nullptr || (state.capturing && state.capturing != awaited.recorded_in)) {
      awaited.recorded_in->invalidate();
      if (state.capturing) state.capturing->invalidate();
      throw invalid_argument(stream == nullptr ? "the default stream cannot join a capture"
                                               : "a wait cannot join two captures into one");
    }
    awaited.recorded_in->join(stream, awaited.frontier);
    state.capturing = awaited.recorded_in;
    return;
  }
  if (!awaited.latest) return;
  if (state.capturing) {
    state.capturing->check_active();
    state.capturing->invalidate();
    throw invalid_argument(
        fmt::format("a captured stream cannot wait for work outside of capture {}",
                    state.capturing->id()),
        "let the stream wait before the capture begins");
  }
  state.queue->push([latest = awaited.latest] { latest->wait(); });
}

void stream_table::begin_capture(native_stream stream) {
  const std::lock_guard lock(mutex_);
  if (stream == nullptr) throw invalid_argument("the default stream cannot be captured");
  auto& state = find(stream);
  if (state.capturing) {
    throw invalid_argument(
        fmt::format("the stream is in capture {} already", state.capturing->id()));
  }
  state.capturing = std::make_shared<capture_session>(stream);
}

std::shared_ptr<const host_graph> stream_table::end_capture(native_stream stream) {
  const std::lock_guard lock(mutex_);
  const session ending = find(stream).capturing;
  if (!ending) throw invalid_argument("the stream is not being captured");
  if (ending->origin() != stream) {
    ending->invalidate();
    throw invalid_argument(fmt::format("capture {} did not begin on this stream", ending->id()),
                           "end it on the stream where it began");
  }
  end(ending);
  return ending->finish();
}

void stream_table::end(const session& ended) {
  for (auto& [name, state] : streams_) {
    if (state.capturing == ended) state.capturing = nullptr;
  }
}

capture_info stream_table::capture(native_stream stream) const {
  if (stream == nullptr) return {};  // is never captured, and need not be made for being asked
  const std::lock_guard lock(mutex_);
  const auto& capturing = const_cast<stream_table*>(this)->find(stream).capturing;
  if (!capturing) return {};
  // CUDA, too, forgets the number of a capture that was invalidated.
  const auto status = capturing->status();
  return {status, status == capture_status::active ? capturing->id() : 0};
}

namespace {

// A node's name: the capture, and its place there. No capture's number is used twice.
constexpr int k_place_bits = 32;

std::vector<graph_node> names(const capture_session& capture,
                              const capture_session::frontier& nodes) {
  std::vector<graph_node> found;
  found.reserve(nodes.size());
  for (const auto node : nodes) found.push_back(graph_node{capture.id() << k_place_bits | node});
  return found;
}

}  // namespace

std::vector<graph_node> stream_table::capture_frontier(native_stream stream) const {
  if (stream == nullptr) return {};
  const std::lock_guard lock(mutex_);
  const auto& capturing = const_cast<stream_table*>(this)->find(stream).capturing;
  if (!capturing || capturing->status() != capture_status::active) return {};
  return names(*capturing, capturing->of(stream));
}

std::vector<graph_node> stream_table::graph_dependencies(graph_node node) const {
  const auto id = static_cast<std::uint64_t>(node) >> k_place_bits;
  const auto place = static_cast<std::uint64_t>(node) & ((std::uint64_t{1} << k_place_bits) - 1);
  const std::lock_guard lock(mutex_);
  for (const auto& [name, state] : streams_) {
    const auto& capturing = state.capturing;
    if (!capturing || capturing->id() != id) continue;
    if (capturing->status() != capture_status::active) break;
    return names(*capturing, capturing->before(place));
  }
  throw invalid_argument(
      fmt::format("node {:#x} is of no active capture", static_cast<std::uint64_t>(node)),
      "ask while the capture of which capture_frontier told is under way");
}

void stream_table::check_not_captured(native_stream stream, std::string_view doing) const {
  if (capture(stream).status == capture_status::none) return;
  throw unsupported(fmt::format("{}: the stream is being captured", doing),
                    "allocate before the capture begins");
}

std::shared_ptr<completion> stream_table::mark(native_stream stream, std::string_view doing) {
  check_not_captured(stream, doing);
  auto reached = std::make_shared<completion>();
  enqueue(stream, [reached] { reached->set(); });
  return reached;
}

}  // namespace evmm::host
