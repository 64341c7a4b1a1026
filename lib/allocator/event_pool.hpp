// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/driver.hpp>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Events of one device, made once and used again. Threads: any.
class event_pool {
 public:
  event_pool(std::shared_ptr<driver> on, device_id device) : on_(std::move(on)), device_(device) {}
  ~event_pool();

  class lease {
   public:
    lease() = default;
    lease(event_pool& from, native_event event) : from_(&from), event_(event) {}
    lease(lease&& other) noexcept;
    lease& operator=(lease&& other) noexcept;
    ~lease() { reset(); }
    native_event get() const noexcept { return event_; }
    /// Events that were recorded later have larger ones.
    std::uint64_t order() const noexcept { return order_; }
    explicit operator bool() const noexcept { return from_ != nullptr; }
    void reset() noexcept;

   private:
    friend class event_pool;
    event_pool* from_ = nullptr;
    native_event event_ = nullptr;
    std::uint64_t order_ = 0;
  };

  /// An event recorded on `stream` now.
  lease record(native_stream stream);

 private:
  std::shared_ptr<driver> on_;
  device_id device_;
  std::mutex guard_;
  std::vector<native_event> idle_;
  std::uint64_t recorded_ = 0;
};

}  // namespace evmm
