// SPDX-License-Identifier: Apache-2.0
#include "tests/bench/plain_mapping.hpp"

#include <evmm/error.hpp>

#include <cuda.h>
#include <fmt/format.h>

#include <vector>

#include <dlfcn.h>

namespace evmm::bench {

namespace {

// The library is looked up at run time, so that the program starts without a GPU.
template <class Function>
Function* look_up(const char* name) {
  static void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* const found = library != nullptr ? dlsym(library, name) : nullptr;
  if (found == nullptr) throw unsupported(fmt::format("libcuda has no {}", name));
  return reinterpret_cast<Function*>(found);
}

void check(CUresult code, const char* call) {
  if (code != CUDA_SUCCESS) throw driver_error(call, {}, code);
}

#define EVMM_PLAIN(function, ...) \
  check(look_up<decltype(function)>(#function)(__VA_ARGS__), #function)

CUmemLocation location_of(memory_location where) {
  CUmemLocation location{};
  location.type =
      where.kind == tier::device ? CU_MEM_LOCATION_TYPE_DEVICE : CU_MEM_LOCATION_TYPE_HOST_NUMA;
  location.id = where.index;
  return location;
}

}  // namespace

plain_mapping::plain_mapping(memory_location where, std::size_t bytes,
                             std::span<const memory_location> users)
    : bytes_(bytes) {
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = location_of(where);
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  CUdeviceptr base = 0;
  EVMM_PLAIN(cuMemAddressReserve, &base, bytes, 0, 0, 0);
  EVMM_PLAIN(cuMemCreate, &handle, bytes, &properties, 0);
  EVMM_PLAIN(cuMemMap, base, bytes, 0, handle, 0);
  EVMM_PLAIN(cuMemRelease, handle);
  std::vector<CUmemAccessDesc> access;
  for (const auto user : users) {
    access.push_back({location_of(user), CU_MEM_ACCESS_FLAGS_PROT_READWRITE});
  }
  EVMM_PLAIN(cuMemSetAccess, base, bytes, access.data(), access.size());
  base_ = base;
}

plain_mapping::~plain_mapping() {
  (void)look_up<decltype(cuMemUnmap)>("cuMemUnmap")(base_, bytes_);
  (void)look_up<decltype(cuMemAddressFree)>("cuMemAddressFree")(base_, bytes_);
}

}  // namespace evmm::bench
