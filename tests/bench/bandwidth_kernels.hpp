// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/types.hpp>

#include <cstddef>

namespace evmm::bench {

/// Kernels of one device that read or write a range once, timed by events.
///
/// Threads: one. Errors: driver_error with the runtime's code.
class bandwidth_probe {
 public:
  explicit bandwidth_probe(device_id device);
  bandwidth_probe(const bandwidth_probe&) = delete;
  bandwidth_probe& operator=(const bandwidth_probe&) = delete;
  ~bandwidth_probe();

  /// Ranges are multiples of this.
  static constexpr std::size_t unit = std::size_t{1} << 20;

  /// Seconds for one pass over [at, at + bytes), the mean of several launched back to back.
  double read(address at, std::size_t bytes);
  double write(address at, std::size_t bytes);

 private:
  struct state;
  state* state_;
};

}  // namespace evmm::bench
