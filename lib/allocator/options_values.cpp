// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/options_values.hpp"

#include <evmm/error.hpp>
#include <evmm/units.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>

namespace evmm {

namespace {

using namespace evmm::units;

// PyTorch keeps one number of divisions for each power of two up to here; the last one holds for
// all larger sizes.
constexpr std::size_t k_last_boundary = 32_GiB;

struct unit_name {
  char letter;
  std::size_t bytes;
};
constexpr unit_name k_units[] = {{'T', 1_TiB}, {'G', 1_GiB}, {'M', 1_MiB}, {'K', 1_KiB}, {'B', 1}};

/// The whole of `text` as a number of type T.
template <class T>
std::optional<T> read_number(std::string_view text) {
  T value{};
  const auto [end, failure] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failure != std::errc{} || end != text.data() + text.size()) return std::nullopt;
  return value;
}

std::optional<std::size_t> times(std::size_t count, std::size_t unit) {
  if (count > std::numeric_limits<std::size_t>::max() / unit) return std::nullopt;
  return count * unit;
}

/// Takes a unit off the end of `text`; `otherwise` when there is none.
std::size_t take_unit(std::string_view& text, std::size_t otherwise) {
  for (const auto& [letter, bytes] : k_units) {
    // PyTorch takes 40g too.
    if (!text.ends_with(letter) && !(letter == 'G' && text.ends_with('g'))) continue;
    text.remove_suffix(1);
    return bytes;
  }
  return otherwise;
}

std::optional<std::size_t> read_size(std::string_view text, std::size_t unit) {
  unit = take_unit(text, unit);
  const auto count = read_number<std::size_t>(text);
  return count ? times(*count, unit) : std::nullopt;
}

constexpr std::string_view k_policies[] = {"nearest", "bind", "interleave"};

}  // namespace

void option_value::refuse(const option_word& what) const {
  throw invalid_argument(
      fmt::format("allocator options, position {}: {} of {} is not allowed", what.position,
                  what.text == "[" ? "the list" : quote_option(what.text),
                  quote_option(entry_.key.text)),
      fmt::format("{} takes {}", entry_.key.text, allowed_));
}

const option_word& option_value::word() const {
  if (entry_.is_list) refuse(entry_.value);
  return entry_.value;
}

const std::vector<option_item>& option_value::list() const {
  if (!entry_.is_list) refuse(entry_.value);
  return entry_.items;
}

bool option_value::truth() const {
  const option_word& from = word();
  if (from.text != "True" && from.text != "False") refuse(from);
  return from.text == "True";
}

std::size_t option_value::size(std::size_t unit) const {
  const option_word& from = word();
  const auto bytes = read_size(from.text, unit);
  if (!bytes) refuse(from);
  return *bytes;
}

double option_value::number() const {
  const option_word& from = word();
  const auto value = read_number<double>(from.text);
  if (!value || !std::isfinite(*value)) refuse(from);
  return *value;
}

std::size_t option_value::size_above_0(std::size_t unit) const {
  const std::size_t bytes = size(unit);
  if (bytes == 0) refuse(entry_.value);
  return bytes;
}

double option_value::number_above(double least) const {
  const double value = number();
  if (value <= least) refuse(entry_.value);
  return value;
}

unsigned option_value::count() const {
  const option_word& from = word();
  const auto value = read_number<unsigned>(from.text);
  if (!value) refuse(from);
  return *value;
}

std::size_t option_value::one_of(const std::vector<std::string_view>& names) const {
  const option_word& from = word();
  const auto found = std::find(names.begin(), names.end(), from.text);
  if (found == names.end()) refuse(from);
  return static_cast<std::size_t>(found - names.begin());
}

reservation option_value::reserve(const option_word& from) const {
  std::string_view digits = from.text;
  const std::size_t unit = take_unit(digits, 0);
  // Whole numbers exactly, so that what write_reserve writes comes back.
  if (const auto whole = read_number<std::size_t>(digits); whole && unit != 0) {
    const auto bytes = times(*whole, unit);
    if (!bytes || *bytes == 0) refuse(from);
    return {.bytes = *bytes};
  }
  const auto value = read_number<double>(digits);
  if (!value || !std::isfinite(*value) || *value <= 0) refuse(from);
  if (unit == 0) return {.bytes = 0, .fraction = *value};
  const double bytes = *value * static_cast<double>(unit);
  if (bytes < 1 || bytes >= 0x1p63) refuse(from);
  return {.bytes = static_cast<std::size_t>(bytes)};
}

reservation option_value::reserve() const {
  return reserve(word());
}

std::map<std::string, reservation> option_value::reserve_by_class() const {
  std::map<std::string, reservation> classes;
  for (const option_item& item : list()) {
    if (!item.has_value) refuse(item.name);
    if (!classes.emplace(item.name.text, reserve(item.value)).second) refuse(item.name);
  }
  return classes;
}

std::vector<rounding_step> option_value::rounding() const {
  const auto divisions = [&](const option_word& from, bool zero) {
    const auto value = read_number<unsigned>(from.text);
    if (!value || !(std::has_single_bit(*value) || (zero && *value == 0))) refuse(from);
    return *value;
  };
  if (!entry_.is_list) return {{0, divisions(entry_.value, false)}};

  // As PyTorch reads it: an entry is for sizes from its boundary up to twice that. Gaps between
  // entries are not divided. The first entry is for all smaller sizes too, `>` for all from the
  // last boundary on, that one included.
  std::map<std::size_t, unsigned> from;
  std::size_t last = 0;
  bool closed = false;
  for (const option_item& item : entry_.items) {
    if (!item.has_value || closed) refuse(item.name);
    const unsigned value = divisions(item.value, true);
    if (item.name.text == ">") {
      from[last] = value;
      from.erase(from.upper_bound(last), from.end());
      closed = true;
      continue;
    }
    const auto boundary = read_size(item.name.text, 1_MiB);
    if (!boundary || !std::has_single_bit(*boundary) || *boundary <= last) refuse(item.name);
    if (last == 0) from[0] = value;
    from[*boundary] = value;
    if (*boundary < k_last_boundary) from[*boundary * 2] = 0;
    last = *boundary;
  }
  std::vector<rounding_step> steps;
  for (const auto& [boundary, value] : from) {
    if (steps.empty() || steps.back().divisions != value) steps.push_back({boundary, value});
  }
  return steps;
}

int option_value::ordinal(const option_item& from) const {
  if (from.has_value) refuse(from.value);
  const auto value = read_number<int>(from.name.text);
  if (!value || *value < 0) refuse(from.name);
  return *value;
}

std::vector<device_id> option_value::devices() const {
  std::vector<device_id> result;
  for (const option_item& item : list()) result.push_back(device_id{ordinal(item)});
  return result;
}

host_placement option_value::placement() const {
  const bool named = entry_.is_list && !entry_.items.empty() && !entry_.items.front().has_value;
  if (entry_.is_list && !named) refuse(entry_.value);
  const option_word& policy = named ? entry_.items.front().name : entry_.value;
  const auto* const found = std::find(std::begin(k_policies), std::end(k_policies), policy.text);
  if (found == std::end(k_policies)) refuse(policy);
  host_placement result;
  result.how = static_cast<host_placement::policy>(found - std::begin(k_policies));
  for (std::size_t i = 1; i < entry_.items.size(); ++i) {
    result.nodes.push_back(numa_node{ordinal(entry_.items[i])});
  }
  return result;
}

std::string write_truth(bool value) {
  return value ? "True" : "False";
}

std::string write_size(std::size_t bytes, std::size_t unit) {
  if (bytes % unit == 0) return fmt::format("{}", bytes / unit);
  return bytes % 1_KiB == 0 ? fmt::format("{}K", bytes / 1_KiB) : fmt::format("{}B", bytes);
}

std::string write_number(double value) {
  // The shortest text that reads back to the same number, whatever the locale.
  return fmt::format("{}", value);
}

std::string write_reserve(const reservation& value) {
  if (value.bytes == 0) return write_number(value.fraction);
  for (const auto& [letter, bytes] : k_units) {
    if (value.bytes % bytes == 0) return fmt::format("{}{}", value.bytes / bytes, letter);
  }
  return fmt::format("{}B", value.bytes);
}

std::string write_reserve_by_class(const std::map<std::string, reservation>& values) {
  std::string text;
  for (const auto& [name, value] : values) {
    text += fmt::format("{}{}:{}", text.empty() ? "" : ",", name, write_reserve(value));
  }
  return fmt::format("[{}]", text);
}

std::string write_rounding(const std::vector<rounding_step>& steps) {
  if (steps.empty()) return "[]";
  const unsigned last = steps.back().divisions;
  if (steps.size() == 1) return last == 0 ? "[>:0]" : fmt::format("{}", last);
  // Every power of two between the first boundary and the last has its entry: gaps would not be
  // divided.
  std::string text;
  auto step = steps.begin();
  for (std::size_t boundary = std::max(steps[1].from / 2, 1_B); boundary != 0; boundary *= 2) {
    if (step + 1 != steps.end() && (step + 1)->from <= boundary) ++step;
    text += fmt::format("{}:{},", write_size(boundary, 1_MiB), step->divisions);
    if (boundary >= steps.back().from) break;
  }
  return fmt::format("[{}>:{}]", text, last);
}

std::string write_devices(const std::vector<device_id>& devices) {
  std::string text;
  for (const device_id device : devices) {
    text += fmt::format("{}{}", text.empty() ? "" : ",", device.value);
  }
  return fmt::format("[{}]", text);
}

std::string write_placement(const host_placement& value) {
  const std::string_view policy = k_policies[static_cast<std::size_t>(value.how)];
  if (value.nodes.empty()) return std::string(policy);
  std::string text = fmt::format("[{}", policy);
  for (const numa_node node : value.nodes) text += fmt::format(",{}", node.value);
  return text + "]";
}

}  // namespace evmm
