// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/log.hpp"

#include <evmm/driver.hpp>

#include <optional>

namespace [[gnu::visibility("default")]] evmm {

/// Makes a device the calling thread's for a scope: the default stream is then that device's, and
/// libraries on the CUDA runtime work on it.
class device_scope {
 public:
  device_scope(driver& on, device_id device)
      : on_(on), device_(device), before_(on.current_device()) {
    if (before_ != device) on_.set_current_device(device);
  }
  device_scope(const device_scope&) = delete;
  device_scope& operator=(const device_scope&) = delete;
  ~device_scope() {
    if (before_ == device_) return;
    log_failure("putting the thread's device back", [&] { on_.set_current_device(before_); });
  }

 private:
  driver& on_;
  device_id device_;
  std::optional<device_id> before_;
};

}  // namespace evmm
