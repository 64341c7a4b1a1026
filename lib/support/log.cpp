// SPDX-License-Identifier: Apache-2.0
#include "lib/support/log.hpp"

#include "lib/support/environment.hpp"

#include <spdlog/sinks/stdout_sinks.h>

namespace evmm {

spdlog::logger& log() {
  // Never destroyed: destructors of static objects may still log.
  static auto* const logger = [] {
    auto* made = new spdlog::logger("evmm", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("[%n %P %H:%M:%S.%e] %l: %v");
    made->set_level(spdlog::level::from_str(environment("EVMM_LOG").value_or("warn")));
    return made;
  }();
  return *logger;
}

}  // namespace evmm
