// SPDX-License-Identifier: Apache-2.0
#include <evmm/error.hpp>

#include <utility>

namespace evmm {

namespace {
std::string line(error_category category, const error_info& info) {
  std::string text = std::string(to_string(category)) + ": " + info.message;
  if (!info.help.empty()) text += "; help: " + info.help;
  return text;
}
}  // namespace

const char* to_string(error_category category) noexcept {
  switch (category) {
    case error_category::invalid_argument:
      return "invalid_argument";
    case error_category::out_of_memory:
      return "out_of_memory";
    case error_category::driver_error:
      return "driver_error";
    case error_category::peer_error:
      return "peer_error";
    case error_category::unsupported:
      return "unsupported";
    case error_category::timed_out:
      return "timed_out";
  }
  return "error";
}

error::error(error_category category, error_info info)
    : std::runtime_error(line(category, info)), category_(category), info_(std::move(info)) {}

void throw_error(error_category category, error_info info) {
  switch (category) {
    case error_category::invalid_argument:
      throw invalid_argument(std::move(info));
    case error_category::out_of_memory:
      throw out_of_memory(std::move(info));
    case error_category::peer_error:
      throw peer_error(std::move(info));
    case error_category::unsupported:
      throw unsupported(std::move(info));
    case error_category::timed_out:
      throw timed_out(std::move(info));
    case error_category::driver_error:
      break;
  }
  throw driver_error(std::move(info));
}

}  // namespace evmm
