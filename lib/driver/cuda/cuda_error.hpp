// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "lib/driver/cuda/cuda_api.hpp"

#include <evmm/error.hpp>

#include <source_location>
#include <string>
#include <utility>

namespace evmm {

/// "CUDA_ERROR_INVALID_VALUE (invalid argument)".
std::string error_text(const cuda_api& api, CUresult result);

/// Which class of evmm's errors a result belongs to.
error_category category_of(CUresult result) noexcept;

/// Throws the error for `result`: "cannot <doing>: CUDA_ERROR_... (...)".
[[noreturn]] void throw_cuda_error(const cuda_api& api, CUresult result, const std::string& doing,
                                   std::string help = {},
                                   std::source_location where = std::source_location::current());

/// Throws unless `result` is success. `doing` is called only then; it returns what was attempted,
/// with its values.
template <class Doing>
void check(const cuda_api& api, CUresult result, Doing&& doing,
           std::source_location where = std::source_location::current()) {
  if (result != CUDA_SUCCESS) [[unlikely]] {
    throw_cuda_error(api, result, std::forward<Doing>(doing)(), {}, where);
  }
}

/// The same for giving something back. When the process ends, libcuda may be torn down before the
/// last owner: it has then freed everything itself.
template <class Doing>
void check_return(const cuda_api& api, CUresult result, Doing&& doing,
                  std::source_location where = std::source_location::current()) {
  if (result == CUDA_ERROR_DEINITIALIZED) return;
  check(api, result, std::forward<Doing>(doing), where);
}

}  // namespace evmm
