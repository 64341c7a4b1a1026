// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <spdlog/spdlog.h>

#include <string_view>

namespace [[gnu::visibility("default")]] evmm {

/// The library's logger, on stderr. EVMM_LOG sets its level: trace, debug, info, warn (the
/// default), error or off.
spdlog::logger& log();

/// Runs a clean-up step that must not throw: an exception is logged with what was being done.
/// For destructors and roll-backs.
template <class Step>
bool log_failure(std::string_view doing, Step&& step) noexcept {
  try {
    step();
    return true;
  } catch (const std::exception& failure) {
    log().error("{}: {}", doing, failure.what());
  } catch (...) {
    log().error("{}: unknown exception", doing);
  }
  return false;
}

/// The same for a step that nothing can replace: tried again once, since CUDA reports errors of
/// earlier asynchronous work at whatever call comes next.
template <class Step>
bool insist(std::string_view doing, Step&& step) noexcept {
  return log_failure(doing, step) || log_failure(doing, step);
}

}  // namespace evmm
