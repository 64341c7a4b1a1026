// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstdint>
#include <string>

namespace evmm::cli {

enum class status : std::uint8_t {
  ok,
  warn,  ///< jobs run, but something is slower, smaller or missing
  fail,  ///< would stop a job here
};

/// "ok", "warn", "fail".
const char* to_string(status level);

/// What one check of `evmm doctor` found.
struct finding {
  status level = status::ok;
  std::string found;         ///< the value, with its unit
  std::string meaning = {};  ///< what follows from it
  std::string remedy = {};   ///< what to do; empty when nothing needs doing
};

}  // namespace evmm::cli
