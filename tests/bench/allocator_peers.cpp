// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/allocator_peers.hpp"

#include <cstdlib>
#include <new>

#include <dlfcn.h>

namespace evmm::bench {

namespace {

using allocate_function = void* (*)(std::size_t);
using free_function = void (*)(void*);

/// Through pointers, so that no compiler removes a pair whose memory is not used.
class malloc_subject {
 public:
  malloc_subject(allocate_function allocate, free_function free)
      : allocate_(allocate), free_(free) {}
  void* allocate(std::size_t bytes, unsigned) const {
    void* const at = allocate_(bytes);
    if (at == nullptr) throw std::bad_alloc();
    return at;
  }
  void free(void* at, unsigned) const { free_(at); }

 private:
  allocate_function allocate_;
  free_function free_;
};

void add_malloc(const std::string& name, allocate_function allocate, free_function free,
                const traces& all) {
  const maker<malloc_subject> make = [=](unsigned) {
    return std::make_unique<malloc_subject>(allocate, free);
  };
  add_pairs(name, make, k_pair_sizes);
  add_live(name, make);
  add_threads(name, make, false);
  add_replays(name, make, all);
}

void add_skipped(const std::string& name, const std::string& why) {
  benchmark::RegisterBenchmark(("pair/" + name).c_str(), [why](benchmark::State& state) {
    state.SkipWithError(why.c_str());
  });
}

template <class Function>
Function find(void* library, const char* name) {
  return reinterpret_cast<Function>(dlsym(library, name));
}

}  // namespace

void add_host_peers(const traces& all) {
  add_malloc("peer_malloc", std::malloc, std::free, all);

  // Never unloaded: its threads' data outlives the cases.
  void* library = dlopen("libmimalloc.so.2", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) library = dlopen("libmimalloc.so", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    add_skipped("peer_mimalloc", why != nullptr ? why : "libmimalloc.so was not found");
    return;
  }
  const auto allocate = find<allocate_function>(library, "mi_malloc");
  const auto free = find<free_function>(library, "mi_free");
  if (allocate == nullptr || free == nullptr) {
    add_skipped("peer_mimalloc", "libmimalloc has no mi_malloc or mi_free");
    return;
  }
  add_malloc("peer_mimalloc", allocate, free, all);
}

}  // namespace evmm::bench
