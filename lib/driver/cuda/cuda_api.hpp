// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>
#include <cudaTypedefs.h>

#include <string>

namespace evmm {

// The entry points used, each with the CUDA version whose signature is meant. Not in the list, on
// purpose: managed memory and multicast objects. Where a signature grew by edge data, the one with
// it is meant: the other fails on graphs that have some.
// clang-format off
#define EVMM_CUDA_ENTRY_POINTS(entry)                                          \
  entry(get_error_name, cuGetErrorName, 6000)                                  \
  entry(get_error_string, cuGetErrorString, 6000)                              \
  entry(init, cuInit, 2000)                                                    \
  entry(device_get_count, cuDeviceGetCount, 2000)                              \
  entry(device_get, cuDeviceGet, 2000)                                         \
  entry(device_get_name, cuDeviceGetName, 2000)                                \
  entry(device_get_attribute, cuDeviceGetAttribute, 2000)                      \
  entry(device_get_pci_bus_id, cuDeviceGetPCIBusId, 4010)                      \
  entry(device_total_mem, cuDeviceTotalMem, 3020)                              \
  entry(device_can_access_peer, cuDeviceCanAccessPeer, 4000)                   \
  entry(pointer_get_attribute, cuPointerGetAttribute, 4000)                    \
  entry(primary_ctx_retain, cuDevicePrimaryCtxRetain, 7000)                    \
  entry(primary_ctx_release, cuDevicePrimaryCtxRelease, 11000)                 \
  entry(primary_ctx_get_state, cuDevicePrimaryCtxGetState, 7000)               \
  entry(ctx_get_current, cuCtxGetCurrent, 4000)                                \
  entry(ctx_set_current, cuCtxSetCurrent, 4000)                                \
  entry(ctx_get_device, cuCtxGetDevice, 2000)                                  \
  entry(ctx_push_current, cuCtxPushCurrent, 4000)                              \
  entry(ctx_pop_current, cuCtxPopCurrent, 4000)                                \
  entry(mem_get_info, cuMemGetInfo, 3020)                                      \
  entry(mem_get_granularity, cuMemGetAllocationGranularity, 10020)             \
  entry(mem_address_reserve, cuMemAddressReserve, 10020)                       \
  entry(mem_address_free, cuMemAddressFree, 10020)                             \
  entry(mem_create, cuMemCreate, 10020)                                        \
  entry(mem_release, cuMemRelease, 10020)                                      \
  entry(mem_map, cuMemMap, 10020)                                              \
  entry(mem_unmap, cuMemUnmap, 10020)                                          \
  entry(mem_set_access, cuMemSetAccess, 10020)                                 \
  entry(mem_export, cuMemExportToShareableHandle, 10020)                       \
  entry(mem_import, cuMemImportFromShareableHandle, 10020)                     \
  entry(mem_host_alloc, cuMemHostAlloc, 2020)                                  \
  entry(mem_free_host, cuMemFreeHost, 2000)                                    \
  entry(mem_host_register, cuMemHostRegister, 6050)                            \
  entry(mem_host_unregister, cuMemHostUnregister, 4000)                        \
  entry(device_get_default_pool, cuDeviceGetDefaultMemPool, 11020)             \
  entry(pool_get_attribute, cuMemPoolGetAttribute, 11020)                      \
  entry(pool_set_attribute, cuMemPoolSetAttribute, 11020)                      \
  entry(pool_trim, cuMemPoolTrimTo, 11020)                                     \
  entry(mem_alloc_from_pool, cuMemAllocFromPoolAsync, 11020)                   \
  entry(mem_free_async, cuMemFreeAsync, 11020)                                 \
  entry(stream_create, cuStreamCreate, 2000)                                   \
  entry(stream_destroy, cuStreamDestroy, 4000)                                 \
  entry(stream_synchronize, cuStreamSynchronize, 2000)                         \
  entry(stream_query, cuStreamQuery, 2000)                                     \
  entry(stream_wait_event, cuStreamWaitEvent, 3020)                            \
  entry(stream_get_ctx, cuStreamGetCtx, 9020)                                  \
  entry(stream_get_capture_info, cuStreamGetCaptureInfo, 12030)                \
  entry(exchange_capture_mode, cuThreadExchangeStreamCaptureMode, 10010)       \
  entry(event_create, cuEventCreate, 2000)                                     \
  entry(event_destroy, cuEventDestroy, 4000)                                   \
  entry(event_record, cuEventRecord, 2000)                                     \
  entry(event_query, cuEventQuery, 2000)                                       \
  entry(event_synchronize, cuEventSynchronize, 2000)                           \
  entry(memcpy_async, cuMemcpyAsync, 4000)                                     \
  entry(memset_d8_async, cuMemsetD8Async, 3020)                                \
  entry(stream_write_value, cuStreamWriteValue64, 11070)                       \
  entry(stream_wait_value, cuStreamWaitValue64, 11070)                         \
  entry(launch_host_func, cuLaunchHostFunc, 10000)                             \
  entry(user_object_create, cuUserObjectCreate, 11030)                         \
  entry(user_object_release, cuUserObjectRelease, 11030)                       \
  entry(graph_retain_user_object, cuGraphRetainUserObject, 11030)              \
  entry(graph_node_get_dependencies, cuGraphNodeGetDependencies, 12030)
// clang-format on

/// libcuda's functions, found at run time.
struct cuda_api {
#define EVMM_CUDA_MEMBER(member, symbol, version) PFN_##symbol##_v##version member = nullptr;
  EVMM_CUDA_ENTRY_POINTS(EVMM_CUDA_MEMBER)
#undef EVMM_CUDA_MEMBER
};

/// libcuda as this process found it, initialised; or why it cannot be used.
struct cuda_library {
  cuda_api api;
  int version = 0;  ///< CUDA version of the driver: 13000 for 13.0
  int devices = 0;
  std::string why_not = {};  ///< empty when usable
  std::string help = {};
  int native_code = 0;
};

/// Loads and initialises libcuda at the first call; it is never unloaded. Does not throw for a
/// machine without one: why_not says so.
const cuda_library& load_cuda();

/// "13.0" for 13000.
std::string cuda_version_text(int version);

}  // namespace evmm
