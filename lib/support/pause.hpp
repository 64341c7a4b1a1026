// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace evmm {

/// Tells the core that this thread looks again and again.
inline void pause_core() noexcept {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace evmm
