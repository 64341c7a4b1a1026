// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/cuda/cuda_api.hpp"

#include <evmm/types.hpp>

#include <atomic>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <unordered_map>

namespace evmm {

/// What host functions threw, by stream, until the stream is synchronised: CUDA has no way to make
/// a stream fail. Thread-safe.
class host_failures {
 public:
  /// Keeps the first failure of a stream.
  void add(native_stream stream, std::exception_ptr failure);
  /// Takes a stream's failure out; null when there is none.
  std::exception_ptr take(native_stream stream) noexcept;

 private:
  std::atomic<std::size_t> count_{0};  ///< so that a stream without failures costs one load
  std::mutex mutex_;
  std::unordered_map<native_stream, std::exception_ptr> by_stream_;
};

/// Runs `function` on one of CUDA's threads in stream order. In a capture, the graph owns the
/// function and each launch of the graph runs it. A context that suits the stream is current.
void launch_host_function(const cuda_api& api, native_stream stream, std::function<void()> function,
                          std::shared_ptr<host_failures> failures);

/// Whether the calling thread is running such a function, or destroying one.
bool in_host_function() noexcept;

/// Whether and into which graph the stream is captured.
struct stream_capture {
  CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
  cuuint64_t id = 0;
  CUgraph graph = nullptr;
  const CUgraphNode* frontier = nullptr;  ///< CUDA's own, until the capture goes on
  const CUgraphEdgeData* edges = nullptr;
  std::size_t frontier_size = 0;
};
stream_capture query_capture(const cuda_api& api, native_stream stream);

}  // namespace evmm
