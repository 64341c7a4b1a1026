// SPDX-License-Identifier: Apache-2.0
#include "comm/nccl_library.hpp"

#include "lib/support/environment.hpp"

#include <fmt/format.h>

#include <type_traits>

#include <dlfcn.h>

namespace evmm {

namespace {

constexpr const char* k_file = "libnccl.so.2";

nccl_library cannot(std::string why_not, std::string help) {
  nccl_library result;
  result.why_not = std::move(why_not);
  result.help = std::move(help);
  return result;
}

std::string last_error() {
  // NOLINTNEXTLINE(concurrency-mt-unsafe): glibc keeps the text per thread
  const char* const text = ::dlerror();
  return text != nullptr ? text : k_file;
}

nccl_library load() {
  // Linked to the program, preloaded, or loaded by a library of it such as PyTorch.
  const bool in_program = ::dlsym(RTLD_DEFAULT, "ncclGetVersion") != nullptr;
  void* library = in_program ? RTLD_DEFAULT : ::dlopen(k_file, RTLD_NOW | RTLD_NOLOAD);
  if (!in_program && library == nullptr) {
    const auto named = environment("EVMM_NCCL_LIBRARY");
    library = ::dlopen(named ? named->c_str() : k_file, RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      return cannot(fmt::format("no NCCL: {}", last_error()),
                    named ? "correct EVMM_NCCL_LIBRARY or unset it"
                          : "install libnccl2, or name its file in EVMM_NCCL_LIBRARY");
    }
  }
  nccl_library loaded;
  std::string missing;
  const auto find = [&](auto& function, const char* name) {
    function =
        reinterpret_cast<std::remove_reference_t<decltype(function)>>(::dlsym(library, name));
    return function != nullptr;
  };
#define EVMM_NCCL_FIND(member, symbol, type) \
  if (!find(loaded.api.member, #symbol)) missing += " " #symbol;
  EVMM_NCCL_ENTRY_POINTS(EVMM_NCCL_FIND)
#undef EVMM_NCCL_FIND
#define EVMM_NCCL_FIND(member, symbol, type) find(loaded.api.member, #symbol);
  EVMM_NCCL_LATER_ENTRY_POINTS(EVMM_NCCL_FIND)
#undef EVMM_NCCL_FIND
  Dl_info where{};
  if (loaded.api.get_version != nullptr &&
      ::dladdr(reinterpret_cast<void*>(loaded.api.get_version), &where) != 0) {
    loaded.path = where.dli_fname;
  }
  if (!missing.empty()) {
    return cannot(fmt::format("the NCCL in {} has no{}", loaded.path, missing),
                  "use NCCL 2.14 or later");
  }
  return loaded;
}

}  // namespace

const nccl_library& load_nccl() {
  // Never destroyed: communicators may outlive main.
  static const auto* const loaded = new nccl_library(load());
  return *loaded;
}

}  // namespace evmm
