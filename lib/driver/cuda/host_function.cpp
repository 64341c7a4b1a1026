// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/host_function.hpp"

#include "lib/driver/cuda/cuda_error.hpp"
#include "lib/support/log.hpp"

#include <utility>

namespace evmm {

namespace {

/// One launch: the function, and where to leave what it throws.
struct host_task {
  std::function<void()> function;
  std::shared_ptr<host_failures> failures;
  native_stream stream;
};

thread_local bool running = false;

/// While one of CUDA's callbacks is under way on this thread: also what a function held may go
/// there, and may not call CUDA either.
struct callback_scope {
  callback_scope() : before(std::exchange(running, true)) {}
  callback_scope(const callback_scope&) = delete;
  callback_scope& operator=(const callback_scope&) = delete;
  ~callback_scope() { running = before; }
  const bool before;
};

// Called by CUDA, through C: nothing may be thrown from here.
void CUDA_CB run(void* data) {
  const callback_scope here;
  auto& task = *static_cast<host_task*>(data);
  try {
    task.function();
  } catch (const std::exception& failure) {
    log().error("a host function on a stream threw: {}", failure.what());
    task.failures->add(task.stream, std::current_exception());
  } catch (...) {
    log().error("a host function on a stream threw an unknown exception");
    task.failures->add(task.stream, std::current_exception());
  }
}

void CUDA_CB destroy(void* data) {
  const callback_scope here;
  delete static_cast<host_task*>(data);
}

void CUDA_CB run_and_destroy(void* data) {
  run(data);
  destroy(data);
}

}  // namespace

void host_failures::add(native_stream stream, std::exception_ptr failure) {
  const std::lock_guard lock(mutex_);
  if (by_stream_.emplace(stream, std::move(failure)).second) count_.fetch_add(1);
}

std::exception_ptr host_failures::take(native_stream stream) noexcept {
  if (count_.load() == 0) return nullptr;
  const std::lock_guard lock(mutex_);
  const auto found = by_stream_.find(stream);
  if (found == by_stream_.end()) return nullptr;
  auto failure = std::move(found->second);
  by_stream_.erase(found);
  count_.fetch_sub(1);
  return failure;
}

bool in_host_function() noexcept {
  return running;
}

stream_capture query_capture(const cuda_api& api, native_stream stream) {
  stream_capture found;
  const CUresult result =
      api.stream_get_capture_info(stream, &found.status, &found.id, &found.graph, &found.frontier,
                                  &found.edges, &found.frontier_size);
  // The legacy default stream answers so while another stream is captured that it would wait for.
  // It is not being captured itself, and never can be.
  if (result == CUDA_ERROR_STREAM_CAPTURE_IMPLICIT) return {};
  check(api, result, [] { return "ask whether a stream is being captured"; });
  return found;
}

void launch_host_function(const cuda_api& api, native_stream stream, std::function<void()> function,
                          std::shared_ptr<host_failures> failures) {
  const auto doing = [] { return "launch a host function"; };
  auto task =
      std::make_unique<host_task>(host_task{std::move(function), std::move(failures), stream});
  const stream_capture capture = query_capture(api, stream);
  if (capture.status != CU_STREAM_CAPTURE_STATUS_ACTIVE) {
    check(api, api.launch_host_func(stream, run_and_destroy, task.get()), doing);
    static_cast<void>(task.release());  // run_and_destroy has it
    return;
  }

  CUuserObject owner = nullptr;
  check(api,
        api.user_object_create(&owner, task.get(), destroy, 1, CU_USER_OBJECT_NO_DESTRUCTOR_SYNC),
        doing);
  host_task* const owned = task.release();
  const CUresult moved =
      api.graph_retain_user_object(capture.graph, owner, 1, CU_GRAPH_USER_OBJECT_MOVE);
  if (moved != CUDA_SUCCESS) api.user_object_release(owner, 1);
  check(api, moved, doing);
  // Should this fail, the graph keeps the function until its end, unused.
  check(api, api.launch_host_func(stream, run, owned), doing);
}

}  // namespace evmm
