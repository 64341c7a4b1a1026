// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstddef>
#include <optional>
#include <span>
#include <vector>

namespace evmm {

/// Page-locked memory through which one message at a time goes, with the event of its copy.
struct staging_chunk {
  std::byte* at = nullptr;
  native_event copied = nullptr;
};

/// A fixed number of chunks and the stream that copies to or from them. Not thread-safe.
class staging {
 public:
  staging(driver& on, device_id device, std::size_t bytes, std::size_t count);
  staging(const staging&) = delete;
  staging& operator=(const staging&) = delete;
  /// Waits for the copies. Chunks that were not given back belong to a transfer that is not over:
  /// they are left.
  ~staging();

  native_stream stream() const noexcept { return stream_; }
  std::optional<staging_chunk> take();
  void give(staging_chunk chunk) noexcept { free_.push_back(chunk); }

 private:
  void clear() noexcept;

  driver& on_;
  native_stream stream_ = nullptr;
  std::vector<staging_chunk> free_;
  std::size_t made_ = 0;
};

}  // namespace evmm
