// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>

#include <condition_variable>
#include <map>
#include <memory>
#include <mutex>

namespace evmm::test {

/// A key-value store for ranks that are threads.
class memory_store {
 public:
  key_value_store face() {
    return {.set = [this](const std::string& key,
                          std::span<const std::byte> value) { set(key, value); },
            .get = [this](const std::string& key,
                          std::chrono::milliseconds wait) { return get(key, wait); },
            .erase = [this](const std::string& key) { erase(key); }};
  }

  void set(const std::string& key, std::span<const std::byte> value) {
    const std::lock_guard lock(mutex_);
    values_[key].assign(value.begin(), value.end());
    changed_.notify_all();
  }
  std::optional<std::vector<std::byte>> get(const std::string& key,
                                            std::chrono::milliseconds wait) {
    std::unique_lock lock(mutex_);
    const auto there = [&] { return values_.contains(key); };
    if (!changed_.wait_for(lock, wait, there)) return std::nullopt;
    return values_.at(key);
  }
  void erase(const std::string& key) {
    const std::lock_guard lock(mutex_);
    values_.erase(key);
  }
  std::size_t size() {
    const std::lock_guard lock(mutex_);
    return values_.size();
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  std::map<std::string, std::vector<std::byte>> values_;
};

}  // namespace evmm::test
