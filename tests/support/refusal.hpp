// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/error.hpp>
#include <evmm/types.hpp>

#include <functional>
#include <string>
#include <string_view>

namespace evmm::test {

inline address at(const void* pointer) {
  return reinterpret_cast<address>(pointer);
}

/// What an error of evmm says with its help; "done" when none came.
inline std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const error& refused) {
    return refused.what();
  }
  return "done";
}

inline bool says(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

}  // namespace evmm::test
