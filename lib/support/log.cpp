// SPDX-License-Identifier: Apache-2.0
#include "lib/support/log.hpp"

#include "lib/support/environment.hpp"

#include <spdlog/sinks/stdout_sinks.h>

#include <memory>
#include <string>

namespace evmm {

spdlog::logger& log() {
  // Never destroyed: destructors of static objects may still log.
  static auto* const logger = [] {
    auto* made = new spdlog::logger("evmm", std::make_shared<spdlog::sinks::stderr_sink_mt>());
    made->set_pattern("[%n %P %H:%M:%S.%e] %l: %v");
    const std::string wanted = environment("EVMM_LOG").value_or("warn");
    const auto level = spdlog::level::from_str(wanted);
    // A name that spdlog does not know is `off` to it, and errors would go unseen.
    const bool known = level != spdlog::level::off || wanted == "off";
    made->set_level(known ? level : spdlog::level::warn);
    if (!known) {
      made->warn("EVMM_LOG is '{}'; it takes trace, debug, info, warn, error or off", wanted);
    }
    return made;
  }();
  return *logger;
}

}  // namespace evmm
