// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/allocator/snapshot.hpp>
#include <evmm/torch.h>
#include <evmm/units.hpp>

#include <gtest/gtest.h>
#include <nlohmann/json.hpp>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <stdexcept>
#include <string>

#include <dlfcn.h>
#include <unistd.h>

// libevmm_torch.so as PyTorch uses it: loaded by name, called through its C functions, on the host
// driver with devices of 64 MiB.

namespace evmm::test {

using namespace evmm::units;
using nlohmann::json;

inline constexpr auto k_mib = static_cast<ssize_t>(1_MiB);

inline void* library() {
  static void* const its = [] {
    void* const loaded = ::dlopen(EVMM_TORCH_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (loaded == nullptr) throw std::runtime_error(::dlerror());
    return loaded;
  }();
  return its;
}

template <class Function>
Function* symbol(const char* name) {
  auto* const found = reinterpret_cast<Function*>(::dlsym(library(), name));
  if (found == nullptr) throw std::runtime_error(::dlerror());
  return found;
}

#define FROM_LIBRARY(name) (symbol<decltype(::name)>(#name))

inline void* allocate(ssize_t bytes, int device = 0) {
  return FROM_LIBRARY(evmm_torch_alloc)(bytes, device, nullptr);
}

inline void free(void* at, int device = 0) {
  FROM_LIBRARY(evmm_torch_free)(at, 0, device, nullptr);
}

inline std::string last_error() {
  return FROM_LIBRARY(evmm_torch_last_error)();
}

inline json statistics(int device = 0) {
  const auto ask = FROM_LIBRARY(evmm_torch_statistics);
  const int length = ask(device, nullptr, 0);
  if (length < 0) throw std::runtime_error(last_error());
  std::string text(static_cast<std::size_t>(length) + 64, '\0');
  text.resize(static_cast<std::size_t>(ask(device, text.data(), text.size())));
  return json::parse(text);
}

inline std::string temporary_file(const char* name) {
  return testing::TempDir() + name + std::to_string(::getpid());
}

inline allocator_snapshot snapshot(int device) {
  const std::string path = temporary_file("torch_face_snapshot");
  if (FROM_LIBRARY(evmm_torch_snapshot)(device, path.c_str()) != EVMM_TORCH_OK) {
    throw std::runtime_error(last_error());
  }
  std::ifstream file(path, std::ios::binary);
  const std::string bytes{std::istreambuf_iterator<char>(file), {}};
  std::filesystem::remove(path);
  return from_pickle(bytes);
}

/// The segment that holds `at`.
inline segment_snapshot segment_of(const void* at) {
  for (const auto& one : snapshot(-1).segments) {
    if (reinterpret_cast<address>(at) - one.at < one.total_bytes) return one;
  }
  throw std::runtime_error("no segment holds the address");
}

class torch_face : public testing::Test {
 protected:
  void TearDown() override { FROM_LIBRARY(evmm_torch_reset)(); }
};

}  // namespace evmm::test
