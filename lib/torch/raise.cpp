// SPDX-License-Identifier: Apache-2.0
// PyTorch makes a torch.OutOfMemoryError from one C++ class alone, c10::OutOfMemoryError, and there
// is no function that throws it with a text of ours. So the exception is made here from what
// PyTorch's libraries export: the constructor of its base, c10::Error, then its own vtable, which
// is all that tells the two apart (the class adds no member).
#include "lib/torch/raise.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <string>
#include <typeinfo>
#include <utility>

#include <cxxabi.h>
#include <dlfcn.h>

namespace evmm::torch {

namespace {

/// As c10::SourceLocation is passed.
struct c10_source_location {
  const char* function;
  const char* file;
  std::uint32_t line;
};

/// Of c10::Error, with room for what later versions may add; it is 128 in PyTorch 2.11.
constexpr std::size_t k_exception_bytes = 1024;

using constructor = void (*)(void* at, c10_source_location where, std::string message);
using destructor = void (*)(void* at);

/// A loaded library, for as long as this object lives.
class loaded_library {
 public:
  explicit loaded_library(const char* name) : handle_(::dlopen(name, RTLD_LAZY | RTLD_NOLOAD)) {}
  ~loaded_library() {
    if (handle_ != nullptr) ::dlclose(handle_);
  }
  loaded_library(const loaded_library&) = delete;
  loaded_library& operator=(const loaded_library&) = delete;

  explicit operator bool() const noexcept { return handle_ != nullptr; }
  /// In the library and those it needs.
  void* find(const char* symbol) const noexcept { return ::dlsym(handle_, symbol); }

 private:
  void* handle_;
};

}  // namespace

bool pytorch_is_here() noexcept {
  return static_cast<bool>(loaded_library("libc10.so"));
}

void raise_out_of_memory(const out_of_memory& failure) {
  // The allocator of PyTorch's own throws this class: its library has the class's tables.
  const loaded_library library("libc10_cuda.so");
  if (!library) return;
  const auto construct = reinterpret_cast<constructor>(library.find(
      "_ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE"));
  auto* const type = static_cast<std::type_info*>(library.find("_ZTIN3c1016OutOfMemoryErrorE"));
  auto* const table = static_cast<void**>(library.find("_ZTVN3c1016OutOfMemoryErrorE"));
  if (construct == nullptr || type == nullptr || table == nullptr) return;
  void** const entries = table + 2;  // after the offset and the type
  // Programs look for these words.
  std::string message = fmt::format("CUDA out of memory. {}", failure.what());
  void* const at = abi::__cxa_allocate_exception(k_exception_bytes);
  try {
    construct(at,
              {failure.where().function_name(), failure.where().file_name(),
               static_cast<std::uint32_t>(failure.where().line())},
              std::move(message));
  } catch (...) {
    abi::__cxa_free_exception(at);
    throw;
  }
  *static_cast<void***>(at) = entries;
  abi::__cxa_throw(at, type, reinterpret_cast<destructor>(entries[0]));
}

}  // namespace evmm::torch
