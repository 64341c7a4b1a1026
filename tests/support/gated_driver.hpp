// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "tests/support/fault_driver.hpp"
#include "tests/support/forwarding_driver.hpp"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <set>

namespace evmm::test {

/// Closed gates, by number. Each closing has a number of its own.
using gate_set = std::set<std::uint64_t>;

/// Holds streams still, and knows which work stands behind which gate: it follows the events that
/// anybody records and waits for through it. Whoever synchronises would wait for ever, so that
/// opens all gates first, and none is closed meanwhile. Captured streams are not followed: open
/// everything before. Thread-safe.
class gated_driver final : public forwarding_driver {
 public:
  using forwarding_driver::forwarding_driver;
  ~gated_driver() override { open_all(); }

  /// Work enqueued on `stream` from now on waits. False, and nothing done, when it is held already
  /// or somebody synchronises.
  bool close(native_stream stream);
  void open_all();
  /// The gate that was closed first.
  void open_oldest();
  std::size_t closed() const;

  /// The closed gates that work enqueued on `stream` now would have to wait for.
  gate_set behind(native_stream stream) const;
  /// Those of `gates` that are still closed.
  gate_set still_closed(const gate_set& gates) const;

  void record(native_event event, native_stream stream) override;
  void wait(native_stream stream, native_event event) override;
  void synchronize(native_stream stream) override;
  void synchronize(native_event event) override;

 private:
  struct gate {
    native_stream stream = nullptr;
    std::unique_ptr<stream_gate> holds;
  };

  gate_set still_closed_locked(const gate_set& gates) const;
  template <class Wait>
  void opened_for(Wait&& wait);

  mutable std::mutex mutex_;
  std::uint64_t closings_ = 0;
  int synchronising_ = 0;
  std::map<std::uint64_t, gate> gates_;
  std::map<native_stream, gate_set> streams_;
  std::map<native_event, gate_set> events_;
};

}  // namespace evmm::test
