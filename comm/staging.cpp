// SPDX-License-Identifier: Apache-2.0
#include "comm/staging.hpp"

#include "lib/support/log.hpp"

namespace evmm {

staging::staging(driver& on, device_id device, std::size_t bytes, std::size_t count) : on_(on) {
  try {
    stream_ = on.create_stream(device);
    free_.reserve(count);
    for (; made_ < count; ++made_) {
      const native_event copied = on.create_event(device);
      free_.push_back({nullptr, copied});
      free_.back().at = reinterpret_cast<std::byte*>(on.allocate_pinned(bytes));
    }
  } catch (...) {
    clear();
    throw;
  }
}

staging::~staging() {
  if (free_.size() != made_) {
    log().warn("{} staging chunks are left behind: their messages were never over",
               made_ - free_.size());
  }
  clear();
}

void staging::clear() noexcept {
  if (stream_ == nullptr) return;
  log_failure("waiting for a channel's copies", [&] { on_.synchronize(stream_); });
  for (const staging_chunk& chunk : free_) {
    log_failure("freeing a channel's staging memory", [&] {
      on_.destroy_event(chunk.copied);
      if (chunk.at != nullptr) on_.free_pinned(reinterpret_cast<address>(chunk.at));
    });
  }
  log_failure("destroying a channel's stream", [&] { on_.destroy_stream(stream_); });
}

std::optional<staging_chunk> staging::take() {
  if (free_.empty()) return std::nullopt;
  const staging_chunk taken = free_.back();
  free_.pop_back();
  return taken;
}

}  // namespace evmm
