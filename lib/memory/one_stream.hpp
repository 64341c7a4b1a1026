// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/error.hpp>
#include <evmm/types.hpp>

#include <cstdint>

namespace evmm {

/// For what remembers streams. CUDA's per-thread default stream (cudaStreamPerThread) has one name
/// for the streams of all threads, so nobody can tell later which was meant: throws unsupported.
inline void require_one_stream(native_stream stream) {
  if (reinterpret_cast<std::uintptr_t>(stream) != 2) return;
  throw unsupported(
      "memory belongs to a stream, and CUDA's per-thread default stream is another in each thread",
      "create a stream for each thread, or use the default stream");
}

}  // namespace evmm
