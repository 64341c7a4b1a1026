// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/cuda/cuda_api.hpp"

#include <evmm/types.hpp>

#include <atomic>
#include <memory>
#include <mutex>
#include <vector>

namespace evmm {

/// The primary contexts, those the CUDA runtime uses too, each retained when first needed: a
/// context costs hundreds of MiB of its device. Thread-safe.
class primary_contexts {
 public:
  primary_contexts(const cuda_api& api, std::vector<CUdevice> devices);
  primary_contexts(const primary_contexts&) = delete;
  primary_contexts& operator=(const primary_contexts&) = delete;
  ~primary_contexts();

  const cuda_api& api() const noexcept { return api_; }
  /// The context of a device that exists.
  CUcontext of(device_id device);
  /// One that exists already, in this driver or elsewhere in the process; null when none does.
  CUcontext existing();
  /// Forgets the contexts without a call: in a forked child.
  void abandon() noexcept;

 private:
  const cuda_api& api_;
  std::vector<CUdevice> devices_;
  std::mutex mutex_;
  std::unique_ptr<std::atomic<CUcontext>[]> retained_;
};

/// Makes a context current for a scope, and leaves the thread's own as it was.
class context_scope {
 public:
  /// The context of a device.
  static context_scope of(primary_contexts& contexts, device_id device);
  /// The context a stream belongs to. A default stream is that of the current context, if any.
  static context_scope of(primary_contexts& contexts, native_stream stream);
  /// Whichever is current, if one is: for calls that need a context, no matter which.
  static context_scope any(primary_contexts& contexts);
  /// The same, but makes none: for memory calls, which by their documentation need none. A rank
  /// must not put a context on device 0 because it reserved addresses.
  static context_scope existing(primary_contexts& contexts);

  context_scope(const context_scope&) = delete;
  context_scope& operator=(const context_scope&) = delete;
  ~context_scope();

 private:
  /// Makes `wanted` current unless it is `current` or null.
  context_scope(const cuda_api& api, CUcontext wanted, CUcontext current);
  const cuda_api& api_;
  bool pushed_;
};

/// Lets a scope make calls that a capture by another part of the program forbids by default, such
/// as querying an event. What evmm does there is never meant to be captured, and a refusal would
/// invalidate that capture.
class outside_capture {
 public:
  explicit outside_capture(const cuda_api& api) : api_(api) { api_.exchange_capture_mode(&mode_); }
  outside_capture(const outside_capture&) = delete;
  outside_capture& operator=(const outside_capture&) = delete;
  ~outside_capture() { api_.exchange_capture_mode(&mode_); }

 private:
  const cuda_api& api_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace evmm
