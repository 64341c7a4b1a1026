// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>
#include <evmm/error.hpp>

#include <chrono>
#include <cstddef>
#include <memory>
#include <ostream>
#include <string>
#include <vector>

namespace evmm::test {

/// The members of `driver` that can be made to fail and are recorded; queries that only describe
/// the machine are not among them.
enum class driver_call {
  usage,
  reserve,
  free,
  create,
  release,
  map,
  unmap,
  set_access,
  export_fd,
  import_fd,
  export_fabric,
  import_fabric,
  allocate_pinned,
  free_pinned,
  pin,
  unpin,
  create_stream,
  destroy_stream,
  synchronize_stream,
  create_event,
  destroy_event,
  record,
  done,
  synchronize_event,
  wait,
  allocate_async,
  free_async,
  trim_async,
  copy,
  fill,
  store_word,
  wait_word,
  launch,
};
const char* to_string(driver_call call);

/// What exists through a driver at one moment; equal before and after means nothing leaked.
struct alive_counts {
  std::size_t ranges = 0, handles = 0, mappings = 0, streams = 0, events = 0;
  std::size_t pinned = 0;        ///< allocated so, or pinned where it lay
  std::size_t async_blocks = 0;  ///< allocated in stream order, and not freed
  std::size_t pinned_bytes = 0, async_bytes = 0;
  std::size_t reserved_bytes = 0, created_bytes = 0, mapped_bytes = 0;
  std::size_t descriptors = 0;  ///< open descriptors of the process
  friend bool operator==(const alive_counts&, const alive_counts&) = default;
};
std::string to_string(const alive_counts& counts);
/// For GoogleTest's messages.
std::ostream& operator<<(std::ostream& out, const alive_counts& counts);

/// A driver that passes calls on to another, fails the one it is told to fail, counts what is
/// alive, and records the sequence of calls. Clean-up calls (release, free*, unmap, unpin, trim,
/// destroy_*) are failed only when asked for by kind. A call that is failed does not reach the
/// other driver. One failure is armed at a time: the next fail_call() replaces it. Thread-safe.
///
/// The use in a test of anything with several steps:
///
///   for (std::size_t nth = 0;; ++nth) {
///     const auto before = faults->alive();
///     faults->fail_call(nth);
///     try { what_is_tested(*faults); } catch (const error&) {}
///     if (!faults->disarm()) break;           // it has fewer steps: all have failed once
///     EXPECT_EQ(faults->alive(), before) << "after failing call " << nth;
///   }
class fault_driver : public driver {
 public:
  static std::shared_ptr<fault_driver> make(std::shared_ptr<driver> inner);

  /// Fails the `nth` (from 0) call from now on that may fail routinely: everything but release,
  /// free*, unmap, unpin, trim_async, destroy_*, synchronize_* and done. One shot.
  virtual void fail_call(std::size_t nth,
                         error_category category = error_category::driver_error) = 0;
  /// Fails the `nth` call of one kind from now on. One shot.
  virtual void fail_call(driver_call kind, std::size_t nth,
                         error_category category = error_category::driver_error) = 0;
  /// Takes back a failure that has not happened; true when it had happened.
  virtual bool disarm() = 0;

  virtual alive_counts alive() const = 0;
  /// Calls since the last clear_record(), in order of completion; also those that failed.
  virtual std::vector<driver_call> record_of_calls() const = 0;
  virtual void clear_record() = 0;
  /// Time spent inside those calls, of all threads together: what the driver itself costs.
  virtual std::chrono::nanoseconds time_in_calls() const = 0;
  /// What calls are passed on to.
  virtual driver& inner() = 0;
};

/// Holds a stream still: work enqueued after construction waits until open() or destruction.
/// Built on driver::launch, so it works on both drivers; but CUDA may run the functions of all
/// streams on one thread, so wait for no other launched function while a gate is closed.
class stream_gate {
 public:
  stream_gate(driver& on, native_stream stream);
  ~stream_gate();
  stream_gate(const stream_gate&) = delete;
  stream_gate& operator=(const stream_gate&) = delete;
  void open();
  /// Blocks until the stream has reached the gate.
  void wait_reached();

 private:
  struct state;
  std::shared_ptr<state> state_;
};

}  // namespace evmm::test
