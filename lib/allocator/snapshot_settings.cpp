// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/snapshot_tree.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <initializer_list>
#include <optional>

namespace evmm {

namespace {

template <class T>
std::optional<T> read_number(std::string_view text) {
  T value{};
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<setting_list> read_list(std::string_view text) {
  if (!text.starts_with('[') || !text.ends_with(']')) return std::nullopt;
  text = text.substr(1, text.size() - 2);
  setting_list list;
  while (!text.empty()) {
    const std::string_view item = text.substr(0, text.find(','));
    const std::size_t colon = item.find(':');
    if (colon == std::string_view::npos) return std::nullopt;
    const auto value = read_number<std::int64_t>(item.substr(colon + 1));
    if (!value) return std::nullopt;
    list.emplace_back(item.substr(0, colon), *value);
    text.remove_prefix(std::min(item.size() + 1, text.size()));
  }
  return list;
}

bool is_one_of(std::string_view name, std::initializer_list<std::string_view> names) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace

setting_value typed_setting(std::string_view name, std::string_view text) {
  if (is_one_of(name, {"expandable_segments", "release_lock_on_cudamalloc",
                       "pinned_use_cuda_host_register", "graph_capture_record_stream_reuse"})) {
    if (text == "True" || text == "False") return text == "True";
  } else if (is_one_of(name, {"max_split_size", "pinned_num_register_threads"})) {
    if (const auto number = read_number<std::int64_t>(text)) return *number;
  } else if (name == "garbage_collection_threshold") {
    const auto number = read_number<double>(text);
    if (number && std::isfinite(*number)) return *number;
  } else if (name == "roundup_power2_divisions") {
    if (auto list = read_list(text)) return *std::move(list);
  }
  return text;
}

}  // namespace evmm
