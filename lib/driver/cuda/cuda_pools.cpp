// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/cuda_driver.hpp"
#include "lib/driver/cuda/cuda_error.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <limits>

namespace evmm {

namespace {

void check_not_zero(std::size_t bytes, const char* doing) {
  if (bytes == 0) throw invalid_argument(fmt::format("cannot {} 0 bytes", doing));
}

void* pointer(address at) {
  return reinterpret_cast<void*>(at);
}

std::size_t attribute(const cuda_api& api, CUmemoryPool pool, CUmemPool_attribute which) {
  cuuint64_t bytes = 0;
  check(api, api.pool_get_attribute(pool, which, &bytes),
        [] { return "ask how much memory a pool holds"; });
  return bytes;
}

}  // namespace

// --- page-locked host memory
// ----------------------------------------------------------------------

address cuda_driver::allocate_pinned(std::size_t bytes) {
  check_caller();
  check_not_zero(bytes, "pin");
  const outside_capture relaxed(api_);
  const auto current = context_scope::any(contexts_);
  void* made = nullptr;
  const CUresult result = api_.mem_host_alloc(&made, bytes, CU_MEMHOSTALLOC_PORTABLE);
  if (result != CUDA_SUCCESS) throw_pin_error(result, bytes);
  const auto at = reinterpret_cast<address>(made);
  pinned_.add(at, bytes);
  return at;
}

void cuda_driver::throw_pin_error(CUresult result, std::size_t bytes) const {
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    throw out_of_memory(
        fmt::format("cannot pin {}: this process holds {} of pinned memory", format_bytes(bytes),
                    format_bytes(pinned_.bytes() + registered_.bytes())),
        "page-locked memory must be in RAM: ask for less, free other pinned memory, or raise the "
        "container's memory limit and ulimit -l",
        result);
  }
  throw_cuda_error(api_, result, fmt::format("pin {}", format_bytes(bytes)));
}

void cuda_driver::free_pinned(address at) {
  check_caller();
  const auto bytes = pinned_.remove(at);
  if (!bytes) {
    throw invalid_argument(
        fmt::format("cannot free pinned memory at {}: nothing was allocated there, or it was freed",
                    format_address(at)),
        "pass what allocate_pinned gave, once");
  }
  const outside_capture relaxed(api_);
  const auto current = context_scope::any(contexts_);
  const CUresult result = api_.mem_free_host(pointer(at));
  if (result != CUDA_SUCCESS) pinned_.add(at, *bytes);
  check_return(api_, result, [&] {
    return fmt::format("free the {} pinned at {}", format_bytes(*bytes), format_address(at));
  });
}

void cuda_driver::pin(address at, std::size_t bytes) {
  check_caller();
  check_not_zero(bytes, "pin");
  const auto doing = [&] {
    return fmt::format("pin {} at {}", format_bytes(bytes), format_address(at));
  };
  if (at == 0 || bytes > std::numeric_limits<address>::max() - at) {
    throw invalid_argument(fmt::format("cannot {}: there is no such memory", doing()));
  }
  if (pinned_.overlaps(at, bytes) || registered_.overlaps(at, bytes)) {
    throw invalid_argument(fmt::format("cannot {}: some of it is pinned already", doing()),
                           "unpin it first");
  }
  const outside_capture relaxed(api_);
  const auto current = context_scope::any(contexts_);
  const CUresult result = api_.mem_host_register(pointer(at), bytes, CU_MEMHOSTREGISTER_PORTABLE);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) throw_pin_error(result, bytes);
  check(api_, result, doing);
  registered_.add(at, bytes);
}

void cuda_driver::unpin(address at) {
  check_caller();
  const auto bytes = registered_.remove(at);
  if (!bytes) {
    throw invalid_argument(
        fmt::format("cannot unpin {}: nothing was pinned there, or it was unpinned",
                    format_address(at)),
        "pass the address that was pinned, once");
  }
  const outside_capture relaxed(api_);
  const auto current = context_scope::any(contexts_);
  const CUresult result = api_.mem_host_unregister(pointer(at));
  if (result != CUDA_SUCCESS) registered_.add(at, *bytes);
  check_return(api_, result, [&] { return fmt::format("unpin {}", format_address(at)); });
}

// --- stream-ordered allocation
// --------------------------------------------------------------------

CUmemoryPool cuda_driver::pool(device_id device) const {
  CUmemoryPool found = nullptr;
  check(api_, api_.device_get_default_pool(&found, entry(device).device),
        [&] { return fmt::format("find the memory pool of DEVICE {}", device.value); });
  return found;
}

void cuda_driver::check_not_captured(native_stream stream, const char* doing) const {
  if (query_capture(api_, stream).status == CU_STREAM_CAPTURE_STATUS_NONE) return;
  throw unsupported(fmt::format("cannot {} in stream order: the stream is being captured", doing),
                    "allocate before the capture begins");
}

address cuda_driver::allocate_async(device_id device, std::size_t bytes, native_stream stream) {
  check_caller();
  entry(device);
  check_not_zero(bytes, "allocate in stream order");
  const outside_capture relaxed(api_);
  const auto current = context_scope::of(contexts_, stream);
  check_not_captured(stream, "allocate");
  const CUmemoryPool from = pool(device);
  auto& kept = pool_kept_[static_cast<std::size_t>(device.value)];
  if (!kept.load()) {
    cuuint64_t all = std::numeric_limits<cuuint64_t>::max();
    check(api_, api_.pool_set_attribute(from, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &all),
          [&] { return fmt::format("let the pool of DEVICE {} keep memory", device.value); });
    kept.store(true);
  }
  CUdeviceptr made = 0;
  const CUresult result = api_.mem_alloc_from_pool(&made, bytes, from, stream);
  if (result == CUDA_ERROR_OUT_OF_MEMORY) {
    std::string room;
    log_failure("asking for free memory", [&] {
      const memory_usage found = usage(memory_location::on(device));
      const async_memory held = async_usage(device);
      room = fmt::format("{} of {} free, the pool holds {}, of which {} are in use",
                         format_bytes(found.free_bytes), format_bytes(found.total_bytes),
                         format_bytes(held.reserved_bytes), format_bytes(held.used_bytes));
    });
    throw out_of_memory(fmt::format("cannot allocate {} on DEVICE {} in stream order: {}",
                                    format_bytes(bytes), device.value, room),
                        "ask for less, free memory and let its stream pass the free, or end other "
                        "processes on the device",
                        result);
  }
  check(api_, result, [&] {
    return fmt::format("allocate {} on DEVICE {} in stream order", format_bytes(bytes),
                       device.value);
  });
  async_.add(made, bytes);
  return made;
}

void cuda_driver::free_async(address at, native_stream stream) {
  check_caller();
  const auto current = context_scope::of(contexts_, stream);
  check_not_captured(stream, "free");
  const auto bytes = async_.remove(at);
  if (!bytes) {
    throw invalid_argument(
        fmt::format("cannot free {} in stream order: nothing was allocated there, or it was freed",
                    format_address(at)),
        "pass what allocate_async gave, once");
  }
  const outside_capture relaxed(api_);
  const CUresult result = api_.mem_free_async(at, stream);
  if (result != CUDA_SUCCESS) async_.add(at, *bytes);
  check_return(api_, result, [&] {
    return fmt::format("free {} at {} in stream order", format_bytes(*bytes), format_address(at));
  });
}

void cuda_driver::trim_async(device_id device, std::size_t keep_bytes) {
  check_caller();
  entry(device);
  const outside_capture relaxed(api_);
  const auto current = context_scope::existing(contexts_);
  check(api_, api_.pool_trim(pool(device), keep_bytes),
        [&] { return fmt::format("trim the memory pool of DEVICE {}", device.value); });
}

async_memory cuda_driver::async_usage(device_id device) const {
  check_caller();
  entry(device);
  const auto current = context_scope::existing(contexts_);
  const CUmemoryPool from = pool(device);
  return {.reserved_bytes = attribute(api_, from, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT),
          .used_bytes = attribute(api_, from, CU_MEMPOOL_ATTR_USED_MEM_CURRENT),
          .reserved_peak = attribute(api_, from, CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH),
          .used_peak = attribute(api_, from, CU_MEMPOOL_ATTR_USED_MEM_HIGH)};
}

}  // namespace evmm
