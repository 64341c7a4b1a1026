// SPDX-License-Identifier: Apache-2.0
// The fake libcuda's streams, which run work where it is enqueued; events; captures and graphs.
#include "tests/support/fake_cuda.hpp"

#include <cstring>

#include <sched.h>

#undef cuStreamDestroy
#undef cuEventDestroy
#undef cuStreamGetCaptureInfo
#undef cuGraphNodeGetDependencies
#undef cuStreamWriteValue64
#undef cuStreamWaitValue64

namespace fake_cuda {

namespace {

CUresult stream_create(CUstream* stream, unsigned) {
  if (const CUresult result = need_context(); result != CUDA_SUCCESS) return result;
  *stream = reinterpret_cast<CUstream>(new stream_entry{.context = current_context()});
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

}  // namespace

const function_table& stream_functions() {
  static const function_table all = {
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
  return all;
}

}  // namespace fake_cuda

using namespace fake_cuda;

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
