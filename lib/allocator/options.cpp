// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/options_keys.hpp"
#include "lib/support/environment.hpp"

#include <evmm/allocator/options.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <map>

namespace evmm {

namespace {

[[noreturn]] void refuse_key(const option_word& key) {
  // Long ones are no slips of the pen, and would take long to compare.
  const std::string_view start = std::string_view(key.text).substr(0, 100);
  const std::span<const option_key> keys = option_keys();
  const auto nearest =
      std::min_element(keys.begin(), keys.end(), [&](const auto& left, const auto& right) {
        return edit_distance(start, left.name) < edit_distance(start, right.name);
      });
  throw invalid_argument(fmt::format("allocator options, position {}: {} is no key", key.position,
                                     quote_option(key.text)),
                         fmt::format("did you mean '{}'?", nearest->name));
}

struct key_position {
  std::size_t key = 0;
  std::size_t value = 0;
};
/// Where each key stood, by its own name.
using key_positions = std::map<std::string_view, key_position>;

/// A fault that involves keys of the string names the place of the first of them.
void check(const allocator_options& options, const key_positions& given) {
  const auto found = find_option_fault(options);
  if (!found) return;
  std::string place;
  for (const std::string_view key : {found->key, found->other_key}) {
    const auto at = given.find(key);
    if (at == given.end() || !place.empty()) continue;
    place = fmt::format(", position {}", at->second.value);
  }
  const option_key* key = find_option_key(found->key);
  throw invalid_argument(
      fmt::format("allocator options{}: {} {}", place, found->key, found->message),
      fmt::format("{} takes {}", key->name, key->allowed));
}

}  // namespace

allocator_options parse_options(std::string_view text, const allocator_options& base) {
  allocator_options options = base;
  key_positions given;
  for (const option_entry& entry : read_option_entries(text)) {
    const option_key* key = find_option_key(entry.key.text);
    if (key == nullptr) refuse_key(entry.key);
    const auto [earlier, fresh] =
        given.emplace(key->name, key_position{entry.key.position, entry.value.position});
    if (!fresh) {
      throw invalid_argument(
          fmt::format("allocator options, position {}: {} was given at position {} already",
                      entry.key.position, quote_option(entry.key.text), earlier->second.key),
          "keep one of the two");
    }
    key->read(options, option_value(entry, key->allowed));
  }
  check(options, given);
  return options;
}

allocator_options options_from_environment() {
  allocator_options options;
  for (const char* name : {"EVMM_ALLOC_CONF", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"}) {
    const auto text = environment(name);
    if (!text) continue;
    try {
      options = parse_options(*text);
    } catch (const invalid_argument& failure) {
      throw invalid_argument(fmt::format("{}: {}", name, failure.message()), failure.help());
    }
    break;
  }
  // Both are looked at, so that a slip in either is found.
  const auto ours = environment_integer("EVMM_NO_CACHING", 0, 1);
  const auto theirs = environment_integer("PYTORCH_NO_CUDA_MEMORY_CACHING", 0, 1);
  if (ours.value_or(theirs.value_or(0)) == 1) options.backend = allocator_backend::none;
  return options;
}

void check(const allocator_options& options) {
  check(options, {});
}

std::string to_string(const allocator_options& options) {
  const allocator_options defaults;
  std::string text;
  for (const option_key& key : option_keys()) {
    const std::string value = key.write(options);
    if (value.empty() || value == key.write(defaults)) continue;
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", key.name, value);
  }
  return text;
}

}  // namespace evmm
