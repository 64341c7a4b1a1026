// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/options.hpp>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <memory>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// Options that may change while other threads read them. Old versions live as long as this, and
/// serve again when they are set again.
/// Threads: now() from any; set() one at a time.
class live_options {
 public:
  explicit live_options(const allocator_options& first) { set(first); }
  const allocator_options& now() const noexcept { return *now_.load(std::memory_order_acquire); }
  void set(const allocator_options& next) {
    auto known = std::find_if(versions_.begin(), versions_.end(),
                              [&](const auto& version) { return *version == next; });
    if (known == versions_.end()) {
      versions_.push_back(std::make_unique<const allocator_options>(next));
      known = std::prev(versions_.end());
    }
    now_.store(known->get(), std::memory_order_release);
  }

 private:
  std::vector<std::unique_ptr<const allocator_options>> versions_;
  std::atomic<const allocator_options*> now_ = nullptr;
};

}  // namespace evmm
