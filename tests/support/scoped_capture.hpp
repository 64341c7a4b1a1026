// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <memory>

namespace evmm::test {

/// A graph capture on a stream, begun by construction: what a user does through CUDA, and what
/// `driver` has no member for. On the host driver by its own members, on CUDA by the functions of
/// the libcuda that the driver loaded (mode global, as PyTorch captures). Looks through a
/// fault_driver. Throws error where a step fails.
class scoped_capture {
 public:
  scoped_capture(driver& on, native_stream stream);
  scoped_capture(const scoped_capture&) = delete;
  scoped_capture& operator=(const scoped_capture&) = delete;
  /// Ends it, unless it ended, and throws the graph away.
  ~scoped_capture();

  /// Ends it. The stream is usable again also when this throws.
  void end();
  /// Runs the graph that end() gave, in stream order.
  void launch(native_stream stream);

 private:
  struct backend;
  struct host_backend;
  struct cuda_backend;
  std::unique_ptr<backend> backend_;
};

}  // namespace evmm::test
