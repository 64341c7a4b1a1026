// SPDX-License-Identifier: Apache-2.0
// The two functions that stand in for NCCL's in a program that preloads this library.
#include "comm/nccl_library.hpp"
#include "comm/ncclmem/ncclmem_pool.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <cstddef>
#include <memory>
#include <string>

#include <dlfcn.h>

namespace evmm {

namespace {

/// The pool of this process, or why it has none.
struct stand_in {
  std::unique_ptr<ncclmem_pool> pool;
  std::string why_not;
};

const stand_in& process_stand_in() {
  // Never destroyed: buffers may be freed after main.
  static const auto* const made = [] {
    auto* const found = new stand_in;
    try {
      found->pool =
          std::make_unique<ncclmem_pool>(default_driver(), ncclmem_options::from_environment());
    } catch (const std::exception& failure) {
      found->why_not = failure.what();
      log().warn("ncclMemAlloc stays NCCL's own: {}", found->why_not);
    }
    return found;
  }();
  return *made;
}

/// NCCL's own function, which comes after this library in the order of search, or is in none: as
/// Python loads modules, what their libraries bring is nobody else's.
template <class Function>
Function nccls_own(const char* name) {
  void* found = ::dlsym(RTLD_NEXT, name);
  if (found == nullptr) {
    void* const nccl = ::dlopen("libnccl.so.2", RTLD_NOW | RTLD_NOLOAD);
    if (nccl != nullptr) found = ::dlsym(nccl, name);
  }
  return reinterpret_cast<Function>(found);
}

int no_nccl(const char* name) {
  log().error("{}: this program has no NCCL whose own could be called", name);
  return nccl_internal_error;
}

}  // namespace

}  // namespace evmm

extern "C" __attribute__((visibility("default"))) int ncclMemAlloc(void** at, std::size_t bytes) {
  using namespace evmm;
  // NCCL has an answer of its own for these, and for machines where evmm has none.
  if (at != nullptr && bytes != 0 && process_stand_in().pool != nullptr) {
    try {
      *at = reinterpret_cast<void*>(process_stand_in().pool->allocate(bytes));
      return nccl_success;
    } catch (const out_of_memory& failure) {
      log().error("{}", failure.what());
      return nccl_unhandled_cuda_error;  // what NCCL's own says then
    } catch (const std::exception& failure) {
      log().warn("ncclMemAlloc of {} bytes goes to NCCL's own: {}", bytes, failure.what());
    }
  }
  static const auto own = nccls_own<int (*)(void**, std::size_t)>("ncclMemAlloc");
  return own != nullptr ? own(at, bytes) : no_nccl("ncclMemAlloc");
}

extern "C" __attribute__((visibility("default"))) int ncclMemFree(void* at) {
  using namespace evmm;
  if (at != nullptr && process_stand_in().pool != nullptr) {
    try {
      if (process_stand_in().pool->free(reinterpret_cast<address>(at))) return nccl_success;
    } catch (const std::exception& failure) {
      log().error("ncclMemFree: {}", failure.what());
      return nccl_internal_error;
    }
  }
  static const auto own = nccls_own<int (*)(void*)>("ncclMemFree");
  return own != nullptr ? own(at) : no_nccl("ncclMemFree");
}
