// SPDX-License-Identifier: Apache-2.0
#include "lib/support/log.hpp"

#include "lib/support/environment.hpp"

#include <spdlog/sinks/stdout_sinks.h>
#include <spdlog/spdlog.h>

#include <cstdio>
#include <exception>
#include <memory>
#include <string>

namespace evmm {

namespace {

spdlog::logger& to_stderr() {
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

spdlog::level::level_enum level_of(logger::level at) {
  switch (at) {
    case logger::level::debug:
      return spdlog::level::debug;
    case logger::level::info:
      return spdlog::level::info;
    case logger::level::warn:
      return spdlog::level::warn;
    default:
      return spdlog::level::err;
  }
}

}  // namespace

void logger::write(level at, fmt::string_view text, fmt::format_args args) const noexcept {
  try {
    spdlog::logger& to = to_stderr();
    if (to.should_log(level_of(at))) to.log(level_of(at), fmt::vformat(text, args));
  } catch (...) {
    std::fputs("evmm: there was no memory for a line of the log\n", stderr);
  }
}

const logger& log() {
  static constexpr logger the_one;
  return the_one;
}

void log_caught(std::string_view doing) noexcept {
  try {
    throw;
  } catch (const std::exception& failure) {
    log().error("{}: {}", doing, failure.what());
  } catch (...) {
    log().error("{}: unknown exception", doing);
  }
}

}  // namespace evmm
