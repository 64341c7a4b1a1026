// SPDX-License-Identifier: Apache-2.0
#include "lib/torch/last_error.hpp"

#include "lib/support/thread_object.hpp"

#include <evmm/error.hpp>
#include <evmm/version.hpp>

#include <exception>
#include <new>

namespace evmm::torch {

namespace {

int code_of(error_category category) noexcept {
  switch (category) {
    case error_category::invalid_argument:
      return EVMM_TORCH_INVALID_ARGUMENT;
    case error_category::out_of_memory:
      return EVMM_TORCH_OUT_OF_MEMORY;
    case error_category::driver_error:
      return EVMM_TORCH_DRIVER_ERROR;
    case error_category::peer_error:
      return EVMM_TORCH_PEER_ERROR;
    case error_category::unsupported:
      return EVMM_TORCH_UNSUPPORTED;
    case error_category::timed_out:
      return EVMM_TORCH_TIMED_OUT;
  }
  return EVMM_TORCH_FAILED;
}

}  // namespace

last_error& last_error::mine() noexcept {
  return thread_object<last_error>();
}

void last_error::clear() noexcept {
  code = EVMM_TORCH_OK;
  message.clear();
}

int last_error::take_current() noexcept {
  try {
    try {
      throw;
    } catch (const error& failure) {
      code = code_of(failure.category());
      message = failure.what();
    } catch (const std::exception& failure) {
      code = EVMM_TORCH_FAILED;
      message = failure.what();
    } catch (...) {
      code = EVMM_TORCH_FAILED;
      message = "an exception of an unknown kind";
    }
  } catch (const std::bad_alloc&) {  // for the text: the code is enough
    message.clear();
  }
  return code;
}

}  // namespace evmm::torch

const char* evmm_torch_last_error() {
  return evmm::torch::last_error::mine().message.c_str();
}

int evmm_torch_last_code() {
  return evmm::torch::last_error::mine().code;
}

const char* evmm_torch_version() {
  return EVMM_VERSION;
}
