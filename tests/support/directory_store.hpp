// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/comm/bootstrap.hpp>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>
#include <thread>

#include <stdlib.h>
#include <unistd.h>

namespace evmm::test {

/// A key-value store for processes that share a directory: a file a key, which appears whole.
class directory_store {
 public:
  directory_store() {
    std::string name = std::filesystem::temp_directory_path() / "evmm-store-XXXXXX";
    if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("cannot make " + name);
    path_ = name;
    owner_ = ::getpid();
  }
  explicit directory_store(std::filesystem::path existing) : path_(std::move(existing)) {}
  ~directory_store() {
    std::error_code ignored;
    if (owner_ == ::getpid()) std::filesystem::remove_all(path_, ignored);
  }
  directory_store(const directory_store&) = delete;
  directory_store& operator=(const directory_store&) = delete;

  const std::filesystem::path& path() const { return path_; }

  key_value_store face() const {
    return {.set =
                [this](const std::string& key, std::span<const std::byte> value) {
                  const auto draft = file(key).string() + "." + std::to_string(::getpid());
                  std::ofstream(draft, std::ios::binary)
                      .write(reinterpret_cast<const char*>(value.data()),
                             static_cast<std::streamsize>(value.size()));
                  std::filesystem::rename(draft, file(key));
                },
            .get = [this](const std::string& key,
                          std::chrono::milliseconds wait) { return get(key, wait); },
            .erase = [this](const std::string& key) { std::filesystem::remove(file(key)); }};
  }

 private:
  std::filesystem::path file(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '-');
    return path_ / key;
  }
  std::optional<std::vector<std::byte>> get(const std::string& key,
                                            std::chrono::milliseconds wait) const {
    const auto until = std::chrono::steady_clock::now() + wait;
    for (;;) {
      if (std::ifstream found(file(key), std::ios::binary); found) {
        const std::string text(std::istreambuf_iterator<char>(found), {});
        const auto bytes = std::as_bytes(std::span{text});
        return std::vector<std::byte>(bytes.begin(), bytes.end());
      }
      if (std::chrono::steady_clock::now() >= until) return std::nullopt;
      std::this_thread::sleep_for(std::chrono::milliseconds(1));  // how a directory is watched
    }
  }

  std::filesystem::path path_;
  pid_t owner_ = -1;
};

}  // namespace evmm::test
