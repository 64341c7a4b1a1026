// SPDX-License-Identifier: Apache-2.0
// What PyTorch calls as its allocator.
#include "lib/support/log.hpp"
#include "lib/torch/device_allocators.hpp"
#include "lib/torch/last_error.hpp"
#include "lib/torch/raise.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

namespace {

using evmm::torch::device_allocator;
using evmm::torch::device_allocators;
using evmm::torch::last_error;

/// Runs what a hook does. A failure is raised in PyTorch; elsewhere it is the last error.
template <class Step>
void hook(Step&& step) {
  last_error::mine().clear();
  try {
    step();
  } catch (const evmm::out_of_memory& failure) {
    last_error::mine().take_current();
    if (!evmm::torch::pytorch_is_here()) return;
    evmm::torch::raise_out_of_memory(failure);
    throw;
  } catch (...) {
    last_error::mine().take_current();
    if (evmm::torch::pytorch_is_here()) throw;
  }
}

evmm::pool_number number_of(const evmm_torch_pool& pool) {
  return {pool.first, pool.second};
}

}  // namespace

void* evmm_torch_alloc(ssize_t bytes, int device, CUstream_st* stream) {
  void* at = nullptr;
  hook([&] {
    if (bytes < 0) {
      throw evmm::invalid_argument(fmt::format("cannot allocate {} bytes", bytes));
    }
    at = device_allocators::all().of(device).allocator.allocate(static_cast<std::size_t>(bytes),
                                                                stream);
  });
  return at;
}

void evmm_torch_free(void* at, ssize_t, int device, CUstream_st*) {
  if (at == nullptr) return;
  const int code = evmm::torch::guarded([&] {
    device_allocator* const its = device_allocators::all().made(device);
    if (its == nullptr) {
      throw evmm::invalid_argument(
          fmt::format("cannot free {}: nothing was allocated on device {}", at, device));
    }
    // The memory is the parent's; PyTorch's objects of it are copied and die here too.
    if (its->process.forked()) return;
    its->allocator.free(at);
  });
  if (code != EVMM_TORCH_OK) evmm::log().error("{}", last_error::mine().message);
}

void evmm_torch_record_stream(void* at, CUstream_st* stream) {
  hook([&] {
    if (at == nullptr) return;
    if (device_allocator* const its = device_allocators::all().owner(at)) {
      its->allocator.record_stream(at, stream);
    }
  });
}

void* evmm_torch_base(void* at, size_t* bytes) {
  void* base = nullptr;
  hook([&] {
    device_allocator* const its = device_allocators::all().owner(at);
    if (its == nullptr) {
      throw evmm::invalid_argument(fmt::format("{} is not a live allocation of any device", at));
    }
    const evmm::allocation_place place = its->allocator.base_allocation(at);
    base = place.base;
    if (bytes != nullptr) *bytes = place.bytes;
  });
  return base;
}

void evmm_torch_reset() {
  hook([] {
    device_allocators::all().for_each_made(
        [](device_allocator& one) { one.allocator.empty_cache(); });
  });
}

void evmm_torch_set_fraction(double fraction, int device) {
  hook([&] { device_allocators::all().of(device).allocator.set_memory_fraction(fraction); });
}

void evmm_torch_begin_allocate_to_pool(int device, evmm_torch_pool pool, void* filter) {
  hook([&] {
    const auto* const given = static_cast<const std::function<bool(evmm::native_stream)>*>(filter);
    if (given == nullptr || !*given) {
      throw evmm::invalid_argument("begin_allocate_to_pool needs a filter");
    }
    device_allocators::all().of(device).begin(number_of(pool), *given);
  });
}

void evmm_torch_end_allocate_to_pool(int device, evmm_torch_pool pool) {
  hook([&] { device_allocators::all().of(device).end(number_of(pool)); });
}

void evmm_torch_release_pool(int device, evmm_torch_pool pool) {
  const int code = evmm::torch::guarded([&] {
    device_allocator& its = device_allocators::all().of(device);
    if (!its.process.forked()) its.release(number_of(pool));
  });
  if (code != EVMM_TORCH_OK) evmm::log().error("{}", last_error::mine().message);
}
