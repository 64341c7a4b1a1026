// SPDX-License-Identifier: Apache-2.0
// The fake libcuda's memory: memfd pages behind handles, pinned memory, pools.
#include "tests/support/fake_cuda.hpp"

#include <cstdlib>
#include <cstring>
#include <mutex>

#include <sys/mman.h>
#include <unistd.h>

#undef cuMemGetInfo
#undef cuMemHostRegister

namespace fake_cuda {

namespace {

constexpr std::size_t k_granularity = std::size_t{2} << 20;

struct handle_entry {
  int fd = -1;
  std::size_t bytes = 0;
  int device = -1;
  CUmemAllocationHandleType types = CU_MEM_HANDLE_TYPE_NONE;
};

struct pool_entry {
  std::map<CUdeviceptr, std::size_t> allocated;
  std::size_t cached = 0;
  std::size_t keeps = 0;
};

std::mutex guard;
pool_entry pools[k_devices];
std::map<CUmemGenericAllocationHandle, handle_entry> handles;
CUmemGenericAllocationHandle next_handle = 0x1000;

std::size_t used(int device) {
  std::size_t bytes = 0;
  for (const auto& [handle, entry] : handles) bytes += entry.device == device ? entry.bytes : 0;
  return bytes;
}
CUresult mem_info(std::size_t* free, std::size_t* total) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  *total = device_bytes();
  *free = *total - used(current_device());
  return CUDA_SUCCESS;
}
CUresult mem_granularity(std::size_t* bytes, const CUmemAllocationProp*,
                         CUmemAllocationGranularity_flags) {
  *bytes = k_granularity;
  return CUDA_SUCCESS;
}
CUresult mem_reserve(CUdeviceptr* at, std::size_t bytes, std::size_t alignment, CUdeviceptr hint,
                     unsigned long long) {
  void* const wish = reinterpret_cast<void*>(hint);
  const int flags = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;
  void* const found = ::mmap(wish, bytes + alignment, PROT_NONE, flags, -1, 0);
  if (found == MAP_FAILED) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = (reinterpret_cast<CUdeviceptr>(found) + alignment - 1) / alignment * alignment;
  return CUDA_SUCCESS;
}
CUresult mem_free(CUdeviceptr at, std::size_t bytes) {
  return ::munmap(reinterpret_cast<void*>(at), bytes) == 0 ? CUDA_SUCCESS
                                                           : CUDA_ERROR_INVALID_VALUE;
}
CUresult mem_create(CUmemGenericAllocationHandle* handle, std::size_t bytes,
                    const CUmemAllocationProp* wanted, unsigned long long) {
  const std::lock_guard lock(guard);
  const bool on_device = wanted->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
  if (!on_device && wanted->location.id != 0) return CUDA_ERROR_INVALID_VALUE;
  if (wanted->requestedHandleTypes == CU_MEM_HANDLE_TYPE_FABRIC) {
    const auto result =
        static_cast<CUresult>(setting("FAKE_CUDA_FABRIC", CUDA_ERROR_NOT_PERMITTED));
    if (result != CUDA_SUCCESS) return result;
  }
  if (on_device && bytes > device_bytes() - used(wanted->location.id)) {
    return CUDA_ERROR_OUT_OF_MEMORY;
  }
  handle_entry made{.fd = ::memfd_create("fake_cuda", 0),
                    .bytes = bytes,
                    .device = on_device ? wanted->location.id : -1,
                    .types = wanted->requestedHandleTypes};
  if (::ftruncate(made.fd, static_cast<off_t>(bytes)) != 0) return CUDA_ERROR_OUT_OF_MEMORY;
  handles[*handle = next_handle++] = made;
  return CUDA_SUCCESS;
}
CUresult mem_release(CUmemGenericAllocationHandle handle) {
  const std::lock_guard lock(guard);
  ::close(handles.at(handle).fd);
  handles.erase(handle);
  return CUDA_SUCCESS;
}
CUresult mem_map(CUdeviceptr at, std::size_t bytes, std::size_t offset,
                 CUmemGenericAllocationHandle handle, unsigned long long) {
  if (offset != 0 || bytes != handles.at(handle).bytes) return CUDA_ERROR_NOT_SUPPORTED;
  void* const mapped = ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE, MAP_SHARED | MAP_FIXED,
                              handles.at(handle).fd, 0);
  return mapped != MAP_FAILED ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult mem_unmap(CUdeviceptr at, std::size_t bytes) {
  ::mmap(reinterpret_cast<void*>(at), bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
  return CUDA_SUCCESS;
}
CUresult mem_access(CUdeviceptr at, std::size_t bytes, const CUmemAccessDesc* grants,
                    std::size_t count) {
  int protection = PROT_NONE;
  for (std::size_t i = 0; i < count; ++i) {
    if (grants[i].flags != CU_MEM_ACCESS_FLAGS_PROT_NONE) protection = PROT_READ | PROT_WRITE;
  }
  ::mprotect(reinterpret_cast<void*>(at), bytes, protection);
  return CUDA_SUCCESS;
}
CUresult mem_export(void* out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                    unsigned long long) {
  const handle_entry& entry = handles.at(handle);
  if (entry.types != type) return CUDA_ERROR_INVALID_VALUE;
  const int fd = type == CU_MEM_HANDLE_TYPE_FABRIC ? entry.fd : ::dup(entry.fd);
  if (fd < 0) return CUDA_ERROR_OPERATING_SYSTEM;
  std::memcpy(out, &fd, sizeof fd);
  return CUDA_SUCCESS;
}
CUresult mem_import(CUmemGenericAllocationHandle* handle, void* in,
                    CUmemAllocationHandleType type) {
  const std::lock_guard lock(guard);
  int fd = static_cast<int>(reinterpret_cast<std::uintptr_t>(in));
  if (type == CU_MEM_HANDLE_TYPE_FABRIC) std::memcpy(&fd, in, sizeof fd);
  handle_entry made{.fd = ::dup(fd), .types = type};
  made.bytes = static_cast<std::size_t>(::lseek(made.fd, 0, SEEK_END));
  handles[*handle = next_handle++] = made;
  return CUDA_SUCCESS;
}
CUresult host_alloc(void** at, std::size_t bytes, unsigned flags) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  if (flags != CU_MEMHOSTALLOC_PORTABLE || bytes == 0) return CUDA_ERROR_INVALID_VALUE;
  if (bytes > device_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = std::aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
  return CUDA_SUCCESS;
}
CUresult host_free(void* at) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  std::free(at);
  return CUDA_SUCCESS;
}
CUresult host_register(void*, std::size_t, unsigned flags) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  return flags == CU_MEMHOSTREGISTER_PORTABLE ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult host_unregister(void*) {
  return need_context();
}
pool_entry* entry_of(CUmemoryPool pool) {
  return reinterpret_cast<pool_entry*>(pool);
}
CUresult default_pool(CUmemoryPool* pool, CUdevice device) {
  *pool = reinterpret_cast<CUmemoryPool>(&pools[device]);
  return CUDA_SUCCESS;
}
CUresult pool_get(CUmemoryPool pool, CUmemPool_attribute which, void* value) {
  const pool_entry& asked = *entry_of(pool);
  std::size_t used = 0;
  for (const auto& [at, bytes] : asked.allocated) used += bytes;
  const bool of_used =
      which == CU_MEMPOOL_ATTR_USED_MEM_CURRENT || which == CU_MEMPOOL_ATTR_USED_MEM_HIGH;
  *static_cast<cuuint64_t*>(value) = of_used ? used : used + asked.cached;
  return CUDA_SUCCESS;
}
CUresult pool_set(CUmemoryPool pool, CUmemPool_attribute which, void* value) {
  if (which != CU_MEMPOOL_ATTR_RELEASE_THRESHOLD) return CUDA_ERROR_INVALID_VALUE;
  entry_of(pool)->keeps = *static_cast<cuuint64_t*>(value);
  return CUDA_SUCCESS;
}
CUresult pool_trim(CUmemoryPool pool, std::size_t) {
  entry_of(pool)->cached = 0;
  return CUDA_SUCCESS;
}
CUresult pool_alloc(CUdeviceptr* at, std::size_t bytes, CUmemoryPool pool, CUstream stream) {
  if (const CUresult result = need_context(stream); result != CUDA_SUCCESS) return result;
  if (bytes > device_bytes()) return CUDA_ERROR_OUT_OF_MEMORY;
  *at = reinterpret_cast<CUdeviceptr>(std::aligned_alloc(512, (bytes + 511) / 512 * 512));
  entry_of(pool)->allocated[*at] = bytes;
  return CUDA_SUCCESS;
}
CUresult async_free(CUdeviceptr at, CUstream stream) {
  if (const CUresult result = need_context(stream); result != CUDA_SUCCESS) return result;
  for (pool_entry& each : pools) {
    const auto found = each.allocated.find(at);
    if (found == each.allocated.end()) continue;
    if (each.keeps != 0) each.cached += found->second;
    each.allocated.erase(found);
    std::free(reinterpret_cast<void*>(at));
    return CUDA_SUCCESS;
  }
  return CUDA_ERROR_INVALID_VALUE;
}

}  // namespace

const function_table& memory_functions() {
  static const function_table all = {
      {"cuMemGetInfo", untyped(mem_info)},
      {"cuMemGetAllocationGranularity", untyped(mem_granularity)},
      {"cuMemAddressReserve", untyped(mem_reserve)},
      {"cuMemAddressFree", untyped(mem_free)},
      {"cuMemCreate", untyped(mem_create)},
      {"cuMemRelease", untyped(mem_release)},
      {"cuMemMap", untyped(mem_map)},
      {"cuMemUnmap", untyped(mem_unmap)},
      {"cuMemSetAccess", untyped(mem_access)},
      {"cuMemExportToShareableHandle", untyped(mem_export)},
      {"cuMemImportFromShareableHandle", untyped(mem_import)},
      {"cuMemHostAlloc", untyped(host_alloc)},
      {"cuMemFreeHost", untyped(host_free)},
      {"cuMemHostRegister", untyped(host_register)},
      {"cuMemHostUnregister", untyped(host_unregister)},
      {"cuDeviceGetDefaultMemPool", untyped(default_pool)},
      {"cuMemPoolGetAttribute", untyped(pool_get)},
      {"cuMemPoolSetAttribute", untyped(pool_set)},
      {"cuMemPoolTrimTo", untyped(pool_trim)},
      {"cuMemAllocFromPoolAsync", untyped(pool_alloc)},
      {"cuMemFreeAsync", untyped(async_free)},
  };
  return all;
}

}  // namespace fake_cuda
