// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/cuda_context.hpp"

#include "lib/driver/cuda/cuda_error.hpp"

#include <fmt/format.h>

#include <utility>

namespace evmm {

namespace {

CUcontext current_context(const cuda_api& api) {
  // Fails only when the process ends; what is called next then says so.
  CUcontext current = nullptr;
  return api.ctx_get_current(&current) == CUDA_SUCCESS ? current : nullptr;
}

/// Null and the two special handles name a stream of whichever context is current.
bool is_default_stream(native_stream stream) {
  return stream == nullptr || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD;
}

}  // namespace

primary_contexts::primary_contexts(const cuda_api& api, std::vector<CUdevice> devices)
    : api_(api),
      devices_(std::move(devices)),
      retained_(std::make_unique<std::atomic<CUcontext>[]>(devices_.size())) {}

primary_contexts::~primary_contexts() {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    // At the end of the process this fails harmlessly.
    if (retained_[i].load() != nullptr) api_.primary_ctx_release(devices_[i]);
  }
  // A context that dies stays this thread's: what is called next, by anybody, would fail with it.
  CUdevice device = 0;
  if (api_.ctx_get_device(&device) == CUDA_ERROR_CONTEXT_IS_DESTROYED) {
    api_.ctx_set_current(nullptr);
  }
}

void primary_contexts::abandon() noexcept {
  for (std::size_t i = 0; i < devices_.size(); ++i) retained_[i].store(nullptr);
}

CUcontext primary_contexts::of(device_id device) {
  auto& slot = retained_[static_cast<std::size_t>(device.value)];
  if (CUcontext context = slot.load(std::memory_order_acquire); context != nullptr) return context;
  const std::lock_guard lock(mutex_);
  CUcontext context = slot.load(std::memory_order_relaxed);
  if (context != nullptr) return context;
  check(api_, api_.primary_ctx_retain(&context, devices_[static_cast<std::size_t>(device.value)]),
        [&] { return fmt::format("make a context on DEVICE {}", device.value); });
  slot.store(context, std::memory_order_release);
  return context;
}

CUcontext primary_contexts::existing() {
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    if (CUcontext context = retained_[i].load(std::memory_order_acquire); context != nullptr) {
      return context;
    }
  }
  for (std::size_t i = 0; i < devices_.size(); ++i) {
    unsigned flags = 0;
    int active = 0;
    const CUresult result = api_.primary_ctx_get_state(devices_[i], &flags, &active);
    if (result == CUDA_SUCCESS && active != 0) return of(device_id{static_cast<int>(i)});
  }
  return nullptr;
}

context_scope context_scope::of(primary_contexts& contexts, device_id device) {
  return {contexts.api(), contexts.of(device), current_context(contexts.api())};
}

context_scope context_scope::of(primary_contexts& contexts, native_stream stream) {
  if (is_default_stream(stream)) return any(contexts);
  const cuda_api& api = contexts.api();
  CUcontext owner = nullptr;
  check(api, api.stream_get_ctx(stream, &owner), [] { return "find the context of a stream"; });
  return {api, owner, current_context(api)};
}

context_scope context_scope::any(primary_contexts& contexts) {
  const CUcontext current = current_context(contexts.api());
  if (current != nullptr) return {contexts.api(), current, current};
  const CUcontext found = contexts.existing();
  return {contexts.api(), found != nullptr ? found : contexts.of(device_id{0}), current};
}

context_scope context_scope::existing(primary_contexts& contexts) {
  const CUcontext current = current_context(contexts.api());
  return {contexts.api(), current != nullptr ? current : contexts.existing(), current};
}

context_scope::context_scope(const cuda_api& api, CUcontext wanted, CUcontext current)
    : api_(api),
      pushed_(wanted != nullptr && wanted != current &&
              api.ctx_push_current(wanted) == CUDA_SUCCESS) {}

context_scope::~context_scope() {
  CUcontext popped = nullptr;
  if (pushed_) api_.ctx_pop_current(&popped);
}

}  // namespace evmm
