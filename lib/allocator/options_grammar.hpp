// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

namespace [[gnu::visibility("default")]] evmm {

/// A piece of the configuration string without its white space.
struct option_word {
  std::string text;
  std::size_t position = 0;  ///< of its first character in the string; 1 is the first
};

/// One member of a list: `a` or `a:b`.
struct option_item {
  option_word name;
  bool has_value = false;
  option_word value = {};
};

/// `key:word` or `key:[item,...]`.
struct option_entry {
  option_word key;
  option_word value;  ///< for a list, its `[`
  bool is_list = false;
  std::vector<option_item> items = {};
};

/// Reads the grammar alone; no key or value is looked at. Throws invalid_argument naming the
/// position.
std::vector<option_entry> read_option_entries(std::string_view text);

/// `'text'`, shortened, and with what cannot be printed as `\xNN`.
std::string quote_option(std::string_view text);

/// Insertions, deletions and replacements of one character between the two.
std::size_t edit_distance(std::string_view from, std::string_view to);

}  // namespace evmm
