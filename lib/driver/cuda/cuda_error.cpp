// SPDX-License-Identifier: Apache-2.0
#include "lib/driver/cuda/cuda_error.hpp"

#include <fmt/format.h>

namespace evmm {

std::string error_text(const cuda_api& api, CUresult result) {
  const char* name = nullptr;
  const char* text = nullptr;
  // Both leave null behind for a number they do not know.
  api.get_error_name(result, &name);
  api.get_error_string(result, &text);
  if (name == nullptr) return fmt::format("CUDA error {}", static_cast<int>(result));
  return text != nullptr ? fmt::format("{} ({})", name, text) : name;
}

error_category category_of(CUresult result) noexcept {
  switch (result) {
    case CUDA_ERROR_INVALID_VALUE:
    case CUDA_ERROR_INVALID_DEVICE:
    case CUDA_ERROR_INVALID_HANDLE:
    case CUDA_ERROR_INVALID_RESOURCE_TYPE:
    case CUDA_ERROR_ALREADY_MAPPED:
    case CUDA_ERROR_NOT_MAPPED:
    case CUDA_ERROR_ILLEGAL_STATE:
    case CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
    case CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED:
    case CUDA_ERROR_CAPTURED_EVENT:
    case CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
    case CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
    case CUDA_ERROR_STREAM_CAPTURE_MERGE:
    case CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
    case CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
    case CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
    case CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
    case CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
      return error_category::invalid_argument;
    case CUDA_ERROR_OUT_OF_MEMORY:
      return error_category::out_of_memory;
    case CUDA_ERROR_NOT_PERMITTED:
    case CUDA_ERROR_NOT_SUPPORTED:
    case CUDA_ERROR_PEER_ACCESS_UNSUPPORTED:
      return error_category::unsupported;
    default:
      return error_category::driver_error;
  }
}

void throw_cuda_error(const cuda_api& api, CUresult result, const std::string& doing,
                      std::string help, std::source_location where) {
  throw_error(category_of(result),
              {.message = fmt::format("cannot {}: {}", doing, error_text(api, result)),
               .help = std::move(help),
               .native_code = result,
               .where = where});
}

}  // namespace evmm
