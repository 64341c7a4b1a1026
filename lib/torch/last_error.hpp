// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/torch.h>

#include <string>
#include <string_view>
#include <utility>

namespace evmm::torch {

/// The calling thread's last failure.
struct last_error {
  int code = EVMM_TORCH_OK;
  std::string message;
  static last_error& mine() noexcept;
  void clear() noexcept;
  /// From the exception that is being handled. Returns the code.
  int take_current() noexcept;
};

/// Runs what a C function does: its code, or that of what it threw.
template <class Step>
int guarded(Step&& step) noexcept {
  last_error::mine().clear();
  try {
    step();
    return EVMM_TORCH_OK;
  } catch (...) {
    return last_error::mine().take_current();
  }
}

}  // namespace evmm::torch
