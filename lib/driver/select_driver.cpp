// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"
#include "lib/support/log.hpp"

#include <evmm/driver.hpp>
#include <evmm/error.hpp>
#include <evmm/host_driver.hpp>

#include <fmt/format.h>

#include <mutex>
#include <utility>

namespace evmm {

namespace {
std::mutex default_mutex;
std::shared_ptr<driver>& default_slot() {
  static std::shared_ptr<driver> slot;
  return slot;
}
}  // namespace

std::shared_ptr<driver> make_driver() {
  const auto wanted = environment("EVMM_DRIVER");
  if (wanted && *wanted != "cuda" && *wanted != "host") {
    throw invalid_argument(fmt::format("EVMM_DRIVER is '{}'", *wanted), "it takes cuda or host");
  }
  if (wanted ? *wanted == "cuda" : cuda_available()) return make_cuda_driver();
  return host_driver::make();
}

std::shared_ptr<driver> default_driver() {
  const std::lock_guard lock(default_mutex);
  auto& slot = default_slot();
  if (!slot) slot = make_driver();
  return slot;
}

void set_default_driver(std::shared_ptr<driver> replacement) {
  const std::lock_guard lock(default_mutex);
  default_slot() = std::move(replacement);
}

}  // namespace evmm
