// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/host/capture.hpp"
#include "lib/driver/host/worker.hpp"

#include <evmm/driver.hpp>
#include <evmm/host_driver.hpp>

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string_view>
#include <vector>

namespace evmm::host {

/// The streams and events of a driver, and the captures under way on them. Thread-safe. Devices
/// have been checked.
class stream_table {
 public:
  stream_table() = default;
  stream_table(const stream_table&) = delete;
  stream_table& operator=(const stream_table&) = delete;

  native_stream create_stream(device_id device);
  void destroy_stream(native_stream stream);
  void synchronize(native_stream stream);
  bool idle(native_stream stream);
  void enqueue(native_stream stream, work next);

  native_event create_event(device_id device);
  void destroy_event(native_event event);
  void record(native_event event, native_stream stream);
  bool done(native_event event);
  void synchronize(native_event event);
  void wait(native_stream stream, native_event event);

  void begin_capture(native_stream stream);
  std::shared_ptr<const host_graph> end_capture(native_stream stream);
  capture_info capture(native_stream stream) const;
  std::vector<graph_node> capture_frontier(native_stream stream) const;
  std::vector<graph_node> graph_dependencies(graph_node node) const;

  /// A point behind the work enqueued so far. Throws unsupported, with `doing`, on a stream that is
  /// being captured.
  std::shared_ptr<completion> mark(native_stream stream, std::string_view doing);
  /// Throws as mark() does, and marks nothing.
  void check_not_captured(native_stream stream, std::string_view doing) const;

 private:
  using session = std::shared_ptr<capture_session>;
  struct stream_state {
    device_id device;
    std::shared_ptr<worker> queue = std::make_shared<worker>();
    session capturing = nullptr;  ///< also after it was invalidated, until it is ended
  };
  struct event_state {
    device_id device;
    std::shared_ptr<completion> latest = nullptr;  ///< null: never recorded
    session recorded_in = nullptr;                 ///< the latest record is in this capture
    capture_session::frontier frontier = {};
  };

  stream_state& find(native_stream stream);
  event_state& find(native_event event);
  /// Throws, and invalidates the capture, when the stream or event is in one.
  void check_not_captured(stream_state& stream, const char* doing);
  void check_not_captured(event_state& event, const char* doing);
  void end(const session& ended);
  void reap();
  std::uintptr_t next_name();

  mutable std::mutex mutex_;
  std::map<native_stream, stream_state> streams_;
  std::map<native_event, event_state> events_;
  std::vector<std::shared_ptr<worker>> closing_;  ///< destroyed streams that still run their work
  std::uintptr_t next_name_ = 0x1000;
};

}  // namespace evmm::host
