// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/host/worker.hpp"

#include <evmm/driver.hpp>
#include <evmm/host_driver.hpp>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

namespace evmm {

/// The work of a capture, in the order in which it was enqueued: an order that keeps every
/// dependency, since work can only depend on what was there before.
struct host_graph {
  std::vector<host::work> nodes;

  void run() const {
    for (const auto& node : nodes) node();
  }
};

}  // namespace evmm

namespace evmm::host {

/// A capture under way, as CUDA defines it: each stream in it has a frontier, the nodes that its
/// next piece of work comes after; an event carries a frontier from one stream to another.
/// Not thread-safe: its owner locks.
class capture_session {
 public:
  using frontier = std::vector<std::size_t>;

  explicit capture_session(native_stream origin);

  std::uint64_t id() const { return id_; }
  native_stream origin() const { return origin_; }
  capture_status status() const { return status_; }
  void invalidate();
  /// Throws invalid_argument unless it is active.
  void check_active() const;

  void add(native_stream stream, work node);
  /// What `node` comes after directly. Throws invalid_argument when there is no such node.
  const frontier& before(std::size_t node) const;
  const frontier& of(native_stream stream) { return frontiers_[stream]; }
  /// What `stream` does next comes after `event` too.
  void join(native_stream stream, const frontier& event);

  /// Ends it. Throws invalid_argument when it was invalidated or when some work does not lead back
  /// to the origin.
  std::shared_ptr<const host_graph> finish();

 private:
  const std::uint64_t id_;
  const native_stream origin_;
  capture_status status_ = capture_status::active;
  std::vector<work> nodes_;
  std::vector<frontier> after_;  ///< of each node, what it comes after
  std::map<native_stream, frontier> frontiers_;
};

}  // namespace evmm::host
