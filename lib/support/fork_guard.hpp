// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <source_location>

namespace [[gnu::visibility("default")]] evmm {

/// Remembers the process it was made in, and costs one load to ask (getpid is a system call).
/// A child of fork shares the parent's objects but none of its threads or device state.
class fork_guard {
 public:
  fork_guard();
  /// Whether this is a forked child of the process that made the guard.
  bool forked() const noexcept;
  /// Throws invalid_argument in a forked child.
  void check(std::source_location where = std::source_location::current()) const;

 private:
  int generation_;
};

}  // namespace evmm
