// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/support/log.hpp"

#include <evmm/driver.hpp>

namespace evmm {

/// A stream that is waited for and destroyed when it is no longer needed.
class scoped_stream {
 public:
  scoped_stream(driver& on, device_id device) : on_(on), stream_(on.create_stream(device)) {}
  scoped_stream(const scoped_stream&) = delete;
  scoped_stream& operator=(const scoped_stream&) = delete;
  ~scoped_stream() {
    log_failure("waiting for a stream", [&] { on_.synchronize(stream_); });
    log_failure("destroying a stream", [&] { on_.destroy_stream(stream_); });
  }
  native_stream get() const noexcept { return stream_; }

 private:
  driver& on_;
  native_stream stream_;
};

}  // namespace evmm
