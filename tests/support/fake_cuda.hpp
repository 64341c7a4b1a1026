// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cuda.h>

#include <cstddef>
#include <deque>
#include <map>
#include <string>
#include <utility>
#include <vector>

#define FAKE_API extern "C" __attribute__((visibility("default")))

/// What the parts of the fake libcuda share.
namespace fake_cuda {

constexpr int k_devices = 2;

/// A number from the environment.
long setting(const char* name, long otherwise);
std::size_t device_bytes();

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

CUcontext context_of(int device);
/// Of the current context.
int current_device();
CUcontext current_context();
/// A context that nobody retains any more is destroyed, and stays current where it was.
CUresult need_context();
/// As the real one asks for launches and sets: the stream's context is current.
CUresult need_context(CUstream stream);

inline stream_entry* entry_of(CUstream stream) {
  return reinterpret_cast<stream_entry*>(stream);
}

/// Names of driver functions and what stands for them.
using function_table = std::map<std::string, void*>;
template <class Function>
void* untyped(Function* function) {
  return reinterpret_cast<void*>(function);
}
const function_table& memory_functions();
const function_table& stream_functions();

}  // namespace fake_cuda
