// SPDX-License-Identifier: Apache-2.0
#include "lib/support/environment.hpp"

#include "lib/support/format.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <charconv>
#include <cstdlib>

namespace evmm {

std::optional<std::string> environment(const char* name) {
  const char* value = std::getenv(name);  // NOLINT(concurrency-mt-unsafe): nobody here sets any
  if (value == nullptr || *value == '\0') return std::nullopt;
  return value;
}

std::optional<long> environment_integer(const char* name, long least, long most) {
  const auto text = environment(name);
  if (!text) return std::nullopt;
  long value = 0;
  const auto [end, failure] = std::from_chars(text->data(), text->data() + text->size(), value);
  if (failure != std::errc{} || end != text->data() + text->size() || value < least ||
      value > most) {
    throw invalid_argument(
        fmt::format("{} is '{}', not an integer from {} to {}", name, *text, least, most),
        "correct the variable or unset it");
  }
  return value;
}

std::optional<std::size_t> environment_bytes(const char* name) {
  const auto text = environment(name);
  if (!text) return std::nullopt;
  return parse_bytes(*text, name);
}

}  // namespace evmm
