// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <fmt/format.h>

#include <string_view>

namespace [[gnu::visibility("default")]] evmm {

/// Writes lines to stderr, and never throws. Through spdlog, whose headers only log.cpp includes:
/// they put fmt's whole formatter into every file that logs, five seconds of compilation each.
class logger {
 public:
  enum class level { debug, info, warn, error };

  template <class... Args>
  void log(level at, fmt::format_string<Args...> text, Args&&... args) const {
    write(at, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void debug(fmt::format_string<Args...> text, Args&&... args) const {
    write(level::debug, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void info(fmt::format_string<Args...> text, Args&&... args) const {
    write(level::info, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void warn(fmt::format_string<Args...> text, Args&&... args) const {
    write(level::warn, text, fmt::make_format_args(args...));
  }
  template <class... Args>
  void error(fmt::format_string<Args...> text, Args&&... args) const {
    write(level::error, text, fmt::make_format_args(args...));
  }

 private:
  void write(level at, fmt::string_view text, fmt::format_args args) const noexcept;
};

/// The library's logger. EVMM_LOG sets its level: trace, debug, info, warn (the default), error or
/// off.
const logger& log();

/// Logs the exception that is being handled, with what was being done.
void log_caught(std::string_view doing) noexcept;

/// Runs a clean-up step that must not throw: an exception is logged with what was being done.
/// For destructors and roll-backs.
template <class Step>
bool log_failure(std::string_view doing, Step&& step) noexcept {
  try {
    step();
    return true;
  } catch (...) {
    log_caught(doing);
    return false;
  }
}

/// The same for a step that nothing can replace: tried again once, since CUDA reports errors of
/// earlier asynchronous work at whatever call comes next.
template <class Step>
bool insist(std::string_view doing, Step&& step) noexcept {
  return log_failure(doing, step) || log_failure(doing, step);
}

}  // namespace evmm
