// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 without a GPU, for what can be learnt of the CUDA driver on any machine: how it
// finds the library, and how it calls it. Memory is memfd pages; streams run work where it is
// enqueued. It is strict where the real one is, and says nothing about the real one's behaviour.
//
// FAKE_CUDA_VERSION, FAKE_CUDA_INIT (result of cuInit), FAKE_CUDA_MISSING (a symbol to leave out),
// FAKE_CUDA_FABRIC (result of creating with a fabric handle) and FAKE_CUDA_BYTES (of each device)
// vary it.
#include <cuda.h>

#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#define FAKE_API extern "C" __attribute__((visibility("default")))

namespace {

constexpr int k_devices = 2;
constexpr std::size_t k_granularity = std::size_t{2} << 20;

long setting(const char* name, long otherwise) {
  const char* const text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return text != nullptr ? std::atol(text) : otherwise;
}

struct handle_entry {
  int fd = -1;
  std::size_t bytes = 0;
  int device = -1;
  CUmemAllocationHandleType types = CU_MEM_HANDLE_TYPE_NONE;
};
struct host_node {
  CUhostFn function;
  void* data;
  host_node* before;
};
struct graph_entry {
  std::deque<host_node> nodes;  // each follows the one before; its address is its CUgraphNode
  CUgraphNode last = nullptr;
  std::vector<std::pair<CUhostFn, void*>> owned;
};
struct stream_entry {
  CUcontext context;
  graph_entry* capture = nullptr;
};

struct pool_entry {
  std::map<CUdeviceptr, std::size_t> allocated;
  std::size_t cached = 0;
  std::size_t keeps = 0;
};

std::mutex guard;
pool_entry pools[k_devices];
int contexts[k_devices] = {};  // retained; the address of each is its CUcontext
thread_local std::vector<CUcontext> stack;
std::map<CUmemGenericAllocationHandle, handle_entry> handles;
CUmemGenericAllocationHandle next_handle = 0x1000;

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(&contexts[device]);
}
stream_entry* entry_of(CUstream stream) {
  return reinterpret_cast<stream_entry*>(stream);
}
/// A context that nobody retains any more is destroyed, and stays current where it was.
CUresult need_context() {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  const bool alive = contexts[stack.back() == context_of(0) ? 0 : 1] > 0;
  return alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}
/// As the real one asks for launches and sets: the stream's context is current.
CUresult need_context(CUstream stream) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  return stream == nullptr || entry_of(stream)->context == stack.back() ? CUDA_SUCCESS
                                                                        : CUDA_ERROR_INVALID_HANDLE;
}

}  // namespace

// --- what the tests ask ---------------------------------------------------------------------

FAKE_API int fake_retained(int device) {
  return contexts[device];
}
FAKE_API int fake_stack_depth() {
  return static_cast<int>(stack.size());
}
FAKE_API graph_entry* fake_begin_capture(CUstream stream) {
  return entry_of(stream)->capture = new graph_entry;
}
FAKE_API void fake_end_capture(CUstream stream) {
  entry_of(stream)->capture = nullptr;
}
FAKE_API void fake_run_graph(graph_entry* graph) {
  for (const host_node& node : graph->nodes) node.function(node.data);
}
FAKE_API void fake_destroy_graph(graph_entry* graph) {
  for (const auto& [destroy, data] : graph->owned) destroy(data);
  delete graph;
}

// --- the driver -----------------------------------------------------------------------------

#undef cuDeviceTotalMem
#undef cuMemGetInfo
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuStreamDestroy
#undef cuEventDestroy
#undef cuDevicePrimaryCtxRelease
#undef cuStreamGetCaptureInfo
#undef cuGetProcAddress
#undef cuMemHostRegister
#undef cuGraphNodeGetDependencies
#undef cuStreamWriteValue64
#undef cuStreamWaitValue64

namespace {

CUresult get_error_name(CUresult result, const char** text) {
  *text = result == CUDA_ERROR_OUT_OF_MEMORY   ? "CUDA_ERROR_OUT_OF_MEMORY"
          : result == CUDA_ERROR_NO_DEVICE     ? "CUDA_ERROR_NO_DEVICE"
          : result == CUDA_ERROR_NOT_PERMITTED ? "CUDA_ERROR_NOT_PERMITTED"
          : result == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE"
                                               : nullptr;
  return *text != nullptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CUresult get_error_string(CUresult, const char** text) {
  *text = nullptr;
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult init(unsigned) {
  return static_cast<CUresult>(setting("FAKE_CUDA_INIT", CUDA_SUCCESS));
}
CUresult device_count(int* count) {
  *count = k_devices;
  return CUDA_SUCCESS;
}
CUresult device_get(CUdevice* device, int ordinal) {
  *device = ordinal;
  return CUDA_SUCCESS;
}
CUresult device_name(char* text, int, CUdevice) {
  std::strcpy(text, "Fake GPU");
  return CUDA_SUCCESS;
}
CUresult device_attribute(int* value, CUdevice_attribute which, CUdevice device) {
  *value = which == CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID ? device - 1 : 1;
  if (which == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT) *value = 132;
  return CUDA_SUCCESS;
}
CUresult device_pci(char* text, int, CUdevice device) {
  std::strcpy(text, device == 0 ? "0000:1B:00.0" : "0000:AF:00.0");
  return CUDA_SUCCESS;
}
std::size_t device_bytes() {
  return static_cast<std::size_t>(setting("FAKE_CUDA_BYTES", 64 << 20));
}
CUresult device_total(std::size_t* bytes, CUdevice) {
  *bytes = device_bytes();
  return CUDA_SUCCESS;
}
CUresult pointer_attribute(void*, CUpointer_attribute, CUdeviceptr) {
  return CUDA_ERROR_INVALID_VALUE;
}
CUresult device_peer(int* can, CUdevice, CUdevice) {
  *can = 0;
  return CUDA_SUCCESS;
}
CUresult primary_retain(CUcontext* context, CUdevice device) {
  ++contexts[device];
  *context = context_of(device);
  return CUDA_SUCCESS;
}
CUresult primary_release(CUdevice device) {
  --contexts[device];
  return CUDA_SUCCESS;
}
CUresult primary_state(CUdevice device, unsigned* flags, int* active) {
  *flags = 0;
  *active = contexts[device] > 0 ? 1 : 0;
  return CUDA_SUCCESS;
}
CUresult ctx_current(CUcontext* context) {
  *context = stack.empty() ? nullptr : stack.back();
  return CUDA_SUCCESS;
}
CUresult ctx_device(CUdevice* device) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  *device = stack.back() == context_of(0) ? 0 : 1;
  return CUDA_SUCCESS;
}
CUresult ctx_set(CUcontext context) {
  if (!stack.empty()) stack.pop_back();
  if (context != nullptr) stack.push_back(context);
  return CUDA_SUCCESS;
}
CUresult ctx_push(CUcontext context) {
  stack.push_back(context);
  return CUDA_SUCCESS;
}
CUresult ctx_pop(CUcontext* context) {
  *context = stack.back();
  stack.pop_back();
  return CUDA_SUCCESS;
}
std::size_t used(int device) {
  std::size_t bytes = 0;
  for (const auto& [handle, entry] : handles) bytes += entry.device == device ? entry.bytes : 0;
  return bytes;
}
CUresult mem_info(std::size_t* free, std::size_t* total) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  *total = device_bytes();
  *free = *total - used(stack.back() == context_of(0) ? 0 : 1);
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
CUresult stream_create(CUstream* stream, unsigned) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  *stream = reinterpret_cast<CUstream>(new stream_entry{.context = stack.back()});
  return CUDA_SUCCESS;
}
CUresult stream_destroy(CUstream stream) {
  delete entry_of(stream);
  return CUDA_SUCCESS;
}
CUresult stream_done(CUstream) {
  return need_context();
}
CUresult stream_wait(CUstream, CUevent, unsigned) {
  return need_context();
}
CUresult stream_context(CUstream stream, CUcontext* context) {
  *context = entry_of(stream)->context;
  return CUDA_SUCCESS;
}
CUresult stream_capture(CUstream stream, CUstreamCaptureStatus* status, cuuint64_t* id,
                        CUgraph* graph, const CUgraphNode** nodes, const CUgraphEdgeData** edges,
                        std::size_t* count) {
  *status = CU_STREAM_CAPTURE_STATUS_NONE;
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  if (stream == nullptr) return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
  graph_entry* const into = entry_of(stream)->capture;
  if (into == nullptr) return CUDA_SUCCESS;
  *status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
  *id = 7;
  *graph = reinterpret_cast<CUgraph>(into);
  if (nodes != nullptr && edges == nullptr) return CUDA_ERROR_LOSSY_QUERY;
  if (nodes == nullptr) return CUDA_SUCCESS;
  into->last = into->nodes.empty() ? nullptr : reinterpret_cast<CUgraphNode>(&into->nodes.back());
  *nodes = &into->last;
  *count = into->nodes.empty() ? 0 : 1;
  return CUDA_SUCCESS;
}
CUresult node_dependencies(CUgraphNode node, CUgraphNode* before, CUgraphEdgeData* edges,
                           std::size_t* count) {
  const auto* const asked = reinterpret_cast<const host_node*>(node);
  if (before != nullptr && edges == nullptr) return CUDA_ERROR_LOSSY_QUERY;
  const std::size_t room = *count;
  *count = asked->before != nullptr ? 1 : 0;
  if (before != nullptr && room > 0 && *count > 0) {
    *before = reinterpret_cast<CUgraphNode>(asked->before);
  }
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
CUresult default_pool(CUmemoryPool* pool, CUdevice device) {
  *pool = reinterpret_cast<CUmemoryPool>(&pools[device]);
  return CUDA_SUCCESS;
}
pool_entry* entry_of(CUmemoryPool pool) {
  return reinterpret_cast<pool_entry*>(pool);
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
CUresult exchange_mode(CUstreamCaptureMode* mode) {
  thread_local CUstreamCaptureMode current = CU_STREAM_CAPTURE_MODE_GLOBAL;
  std::swap(current, *mode);
  return CUDA_SUCCESS;
}
CUresult event_create(CUevent* event, unsigned flags) {
  if (flags != CU_EVENT_DISABLE_TIMING) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  *event = reinterpret_cast<CUevent>(new int);
  return CUDA_SUCCESS;
}
CUresult event_destroy(CUevent event) {
  delete reinterpret_cast<int*>(event);
  return CUDA_SUCCESS;
}
CUresult event_record(CUevent, CUstream) {
  return need_context();
}
CUresult event_query(CUevent) {
  CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
  exchange_mode(&mode);
  const bool relaxed = mode == CU_STREAM_CAPTURE_MODE_RELAXED;
  exchange_mode(&mode);
  return relaxed ? need_context() : CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
}
CUresult event_synchronize(CUevent event) {
  return event_query(event);
}
CUresult copy(CUdeviceptr to, CUdeviceptr from, std::size_t bytes, CUstream stream) {
  if (const CUresult result = need_context(stream); result != CUDA_SUCCESS) return result;
  std::memmove(reinterpret_cast<void*>(to), reinterpret_cast<const void*>(from), bytes);
  return CUDA_SUCCESS;
}
CUresult fill(CUdeviceptr at, unsigned char value, std::size_t bytes, CUstream stream) {
  if (const CUresult result = need_context(stream); result != CUDA_SUCCESS) return result;
  std::memset(reinterpret_cast<void*>(at), value, bytes);
  return CUDA_SUCCESS;
}
/// Nothing else runs on a stream that runs its work where it is enqueued: who stores is another
/// thread, or has stored already.
CUresult write_value(CUstream stream, CUdeviceptr at, cuuint64_t value, unsigned flags) {
  if (flags != CU_STREAM_WRITE_VALUE_DEFAULT || at % 8 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = need_context(stream); result != CUDA_SUCCESS) return result;
  __atomic_store_n(reinterpret_cast<cuuint64_t*>(at), value, __ATOMIC_RELEASE);
  return CUDA_SUCCESS;
}
CUresult wait_value(CUstream stream, CUdeviceptr at, cuuint64_t least, unsigned flags) {
  if (flags != CU_STREAM_WAIT_VALUE_GEQ || at % 8 != 0) return CUDA_ERROR_INVALID_VALUE;
  if (const CUresult result = need_context(stream); result != CUDA_SUCCESS) return result;
  const auto* const word = reinterpret_cast<const cuuint64_t*>(at);
  while (static_cast<long long>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - least) < 0) sched_yield();
  return CUDA_SUCCESS;
}
CUresult launch_host(CUstream stream, CUhostFn function, void* data) {
  if (const CUresult result = need_context(stream); result != CUDA_SUCCESS) return result;
  if (stream != nullptr && entry_of(stream)->capture != nullptr) {
    auto& nodes = entry_of(stream)->capture->nodes;
    nodes.push_back({function, data, nodes.empty() ? nullptr : &nodes.back()});
  } else {
    function(data);
  }
  return CUDA_SUCCESS;
}
CUresult user_object_create(CUuserObject* object, void* data, CUhostFn destroy, unsigned references,
                            unsigned flags) {
  if (references != 1 || flags != CU_USER_OBJECT_NO_DESTRUCTOR_SYNC)
    return CUDA_ERROR_INVALID_VALUE;
  *object = reinterpret_cast<CUuserObject>(new std::pair<CUhostFn, void*>(destroy, data));
  return CUDA_SUCCESS;
}
CUresult user_object_release(CUuserObject, unsigned) {
  return CUDA_SUCCESS;
}
CUresult graph_retain(CUgraph graph, CUuserObject object, unsigned, unsigned flags) {
  if (flags != CU_GRAPH_USER_OBJECT_MOVE) return CUDA_ERROR_INVALID_VALUE;
  auto* const owned = reinterpret_cast<std::pair<CUhostFn, void*>*>(object);
  reinterpret_cast<graph_entry*>(graph)->owned.push_back(*owned);
  delete owned;
  return CUDA_SUCCESS;
}

template <class Function>
void* untyped(Function* function) {
  return reinterpret_cast<void*>(function);
}

const std::map<std::string, void*> k_functions = {
    {"cuGetErrorName", untyped(get_error_name)},
    {"cuGetErrorString", untyped(get_error_string)},
    {"cuInit", untyped(init)},
    {"cuDeviceGetCount", untyped(device_count)},
    {"cuDeviceGet", untyped(device_get)},
    {"cuDeviceGetName", untyped(device_name)},
    {"cuDeviceGetAttribute", untyped(device_attribute)},
    {"cuDeviceGetPCIBusId", untyped(device_pci)},
    {"cuDeviceTotalMem", untyped(device_total)},
    {"cuDeviceCanAccessPeer", untyped(device_peer)},
    {"cuPointerGetAttribute", untyped(pointer_attribute)},
    {"cuDevicePrimaryCtxRetain", untyped(primary_retain)},
    {"cuDevicePrimaryCtxRelease", untyped(primary_release)},
    {"cuDevicePrimaryCtxGetState", untyped(primary_state)},
    {"cuCtxGetCurrent", untyped(ctx_current)},
    {"cuCtxGetDevice", untyped(ctx_device)},
    {"cuCtxSetCurrent", untyped(ctx_set)},
    {"cuCtxPushCurrent", untyped(ctx_push)},
    {"cuCtxPopCurrent", untyped(ctx_pop)},
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
    {"cuGraphNodeGetDependencies", untyped(node_dependencies)},
    {"cuStreamCreate", untyped(stream_create)},
    {"cuStreamDestroy", untyped(stream_destroy)},
    {"cuStreamSynchronize", untyped(stream_done)},
    {"cuStreamQuery", untyped(stream_done)},
    {"cuStreamWaitEvent", untyped(stream_wait)},
    {"cuStreamGetCtx", untyped(stream_context)},
    {"cuStreamGetCaptureInfo", untyped(stream_capture)},
    {"cuThreadExchangeStreamCaptureMode", untyped(exchange_mode)},
    {"cuEventCreate", untyped(event_create)},
    {"cuEventDestroy", untyped(event_destroy)},
    {"cuEventRecord", untyped(event_record)},
    {"cuEventQuery", untyped(event_query)},
    {"cuEventSynchronize", untyped(event_synchronize)},
    {"cuMemcpyAsync", untyped(copy)},
    {"cuMemsetD8Async", untyped(fill)},
    {"cuStreamWriteValue64", untyped(write_value)},
    {"cuStreamWaitValue64", untyped(wait_value)},
    {"cuLaunchHostFunc", untyped(launch_host)},
    {"cuUserObjectCreate", untyped(user_object_create)},
    {"cuUserObjectRelease", untyped(user_object_release)},
    {"cuGraphRetainUserObject", untyped(graph_retain)},
};

}  // namespace

FAKE_API CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("FAKE_CUDA_VERSION", 13000));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuGetProcAddress_v2(const char* symbol, void** function, int /*version*/,
                                      cuuint64_t /*flags*/,
                                      CUdriverProcAddressQueryResult* status) {
  const char* const missing = std::getenv("FAKE_CUDA_MISSING");  // NOLINT(concurrency-mt-unsafe)
  const auto found = k_functions.find(symbol);
  const bool here =
      found != k_functions.end() && (missing == nullptr || std::strcmp(missing, symbol) != 0);
  *function = here ? found->second : nullptr;
  *status = here ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return CUDA_SUCCESS;
}
