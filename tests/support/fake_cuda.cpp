// SPDX-License-Identifier: Apache-2.0
// A libcuda.so.1 without a GPU, for what can be learnt of the CUDA driver on any machine: how it
// finds the library, and how it calls it. Memory is memfd pages; streams run work where it is
// enqueued. It is strict where the real one is, and says nothing about the real one's behaviour.
//
// FAKE_CUDA_VERSION, FAKE_CUDA_INIT (result of cuInit), FAKE_CUDA_MISSING (a symbol to leave out),
// FAKE_CUDA_FABRIC (result of creating with a fabric handle) and FAKE_CUDA_BYTES (of each device)
// vary it.
#include "tests/support/fake_cuda.hpp"

#include <cstdlib>
#include <cstring>

#undef cuDeviceTotalMem
#undef cuCtxPushCurrent
#undef cuCtxPopCurrent
#undef cuDevicePrimaryCtxRelease
#undef cuGetProcAddress

namespace fake_cuda {

namespace {
int contexts[k_devices] = {};  // retained; the address of each is its CUcontext
thread_local std::vector<CUcontext> stack;
}  // namespace

long setting(const char* name, long otherwise) {
  const char* const text = std::getenv(name);  // NOLINT(concurrency-mt-unsafe)
  return text != nullptr ? std::atol(text) : otherwise;
}

std::size_t device_bytes() {
  return static_cast<std::size_t>(setting("FAKE_CUDA_BYTES", 64 << 20));
}

CUcontext context_of(int device) {
  return reinterpret_cast<CUcontext>(&contexts[device]);
}
CUcontext current_context() {
  return stack.back();
}
int current_device() {
  return stack.back() == context_of(0) ? 0 : 1;
}
CUresult need_context() {
  if (stack.empty()) return CUDA_ERROR_INVALID_CONTEXT;
  const bool alive = contexts[current_device()] > 0;
  return alive ? CUDA_SUCCESS : CUDA_ERROR_CONTEXT_IS_DESTROYED;
}
CUresult need_context(CUstream stream) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  return stream == nullptr || entry_of(stream)->context == stack.back() ? CUDA_SUCCESS
                                                                        : CUDA_ERROR_INVALID_HANDLE;
}

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
CUresult device_total(std::size_t* bytes, CUdevice) {
  *bytes = device_bytes();
  return CUDA_SUCCESS;
}
CUresult device_peer(int* can, CUdevice, CUdevice) {
  *can = 0;
  return CUDA_SUCCESS;
}
CUresult pointer_attribute(void*, CUpointer_attribute, CUdeviceptr) {
  return CUDA_ERROR_INVALID_VALUE;
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
  *device = current_device();
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

const function_table& device_functions() {
  static const function_table all = {
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
  };
  return all;
}

}  // namespace

}  // namespace fake_cuda

using namespace fake_cuda;

FAKE_API int fake_retained(int device) {
  return contexts[device];
}
FAKE_API int fake_stack_depth() {
  return static_cast<int>(stack.size());
}

FAKE_API CUresult cuDriverGetVersion(int* version) {
  *version = static_cast<int>(setting("FAKE_CUDA_VERSION", 13000));
  return CUDA_SUCCESS;
}

FAKE_API CUresult cuGetProcAddress_v2(const char* symbol, void** function, int /*version*/,
                                      cuuint64_t /*flags*/,
                                      CUdriverProcAddressQueryResult* status) {
  const char* const missing = std::getenv("FAKE_CUDA_MISSING");  // NOLINT(concurrency-mt-unsafe)
  *function = nullptr;
  for (const function_table* table :
       {&device_functions(), &memory_functions(), &stream_functions()}) {
    const auto found = table->find(symbol);
    if (found != table->end()) *function = found->second;
  }
  if (missing != nullptr && std::strcmp(missing, symbol) == 0) *function = nullptr;
  *status =
      *function != nullptr ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
  return CUDA_SUCCESS;
}
