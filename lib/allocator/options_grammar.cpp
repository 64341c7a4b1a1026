// SPDX-License-Identifier: Apache-2.0
#include "lib/allocator/options_grammar.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <utility>

namespace evmm {

namespace {

constexpr const char* k_grammar = "write key:value,key:value, and lists as [a:b,c:d]";
constexpr std::string_view k_separators = ",:[]";

// Not std::isspace, which the process's locale changes.
bool is_space(char c) {
  return c == ' ' || (c >= '\t' && c <= '\r');
}

bool is_separator(std::string_view token) {
  return token.size() == 1 && k_separators.find(token.front()) != std::string_view::npos;
}

/// Separators and the words between them; the last one is empty and stands for the end.
std::vector<option_word> tokenize(std::string_view text) {
  std::vector<option_word> tokens;
  bool in_word = false;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const char c = text[i];
    if (is_space(c)) continue;
    const bool separator = k_separators.find(c) != std::string_view::npos;
    if (separator || !in_word) {
      tokens.push_back({std::string(1, c), i + 1});
    } else {
      tokens.back().text += c;
    }
    in_word = !separator;
  }
  tokens.push_back({"", text.size() + 1});
  return tokens;
}

class grammar {
 public:
  explicit grammar(std::string_view text) : tokens_(tokenize(text)) {}

  std::vector<option_entry> entries() {
    std::vector<option_entry> result;
    if (at_end()) return result;
    for (;;) {
      result.push_back(entry());
      if (at_end()) return result;
      take(',', fmt::format("after the value of {}", quote_option(result.back().key.text)));
    }
  }

 private:
  const option_word& now() const { return tokens_[next_]; }
  bool at_end() const { return now().text.empty(); }
  bool is(char separator) const { return now().text == std::string_view(&separator, 1); }

  [[noreturn]] void refuse(std::string_view expected) const {
    throw invalid_argument(
        fmt::format("allocator options, position {}: {} where {} is expected", now().position,
                    at_end() ? "the end of the string" : quote_option(now().text), expected),
        k_grammar);
  }

  void take(char separator, std::string_view where) {
    if (!is(separator)) refuse(fmt::format("'{}' {}", separator, where));
    ++next_;
  }

  option_word take_word(std::string_view what) {
    if (at_end() || is_separator(now().text)) refuse(what);
    return std::move(tokens_[next_++]);
  }

  option_entry entry() {
    option_entry read;
    read.key = take_word("a key");
    const std::string key = quote_option(read.key.text);
    take(':', fmt::format("after the key {}", key));
    if (is('[')) {
      read.is_list = true;
      read.value = now();
      ++next_;
      list(read);
    } else {
      read.value = take_word(fmt::format("the value of {}", key));
    }
    return read;
  }

  void list(option_entry& read) {
    const std::string key = quote_option(read.key.text);
    const auto refuse_open = [&] {
      throw invalid_argument(
          fmt::format("allocator options, position {}: the list of {} is not closed",
                      read.value.position, key),
          "end the list with ']'");
    };
    if (is(']')) {
      ++next_;
      return;
    }
    for (;;) {
      if (at_end()) refuse_open();
      option_item item;
      item.name = take_word(fmt::format("a member of the list of {}", key));
      if (is(':')) {
        ++next_;
        if (at_end()) refuse_open();
        item.has_value = true;
        item.value = take_word(fmt::format("the value of {}", quote_option(item.name.text)));
      }
      read.items.push_back(std::move(item));
      if (at_end()) refuse_open();
      if (is(']')) {
        ++next_;
        return;
      }
      take(',', fmt::format("or ']' in the list of {}", key));
    }
  }

  std::vector<option_word> tokens_;
  std::size_t next_ = 0;
};

}  // namespace

std::vector<option_entry> read_option_entries(std::string_view text) {
  return grammar(text).entries();
}

std::string quote_option(std::string_view text) {
  constexpr std::size_t most = 60;
  std::string quoted = "'";
  for (const char c : text.substr(0, most)) {
    if (c >= ' ' && c <= '~') {
      quoted += c;
    } else {
      quoted += fmt::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  quoted += text.size() > most ? "...'" : "'";
  return quoted;
}

std::size_t edit_distance(std::string_view from, std::string_view to) {
  // One row of the table of distances between prefixes.
  std::vector<std::size_t> row(to.size() + 1);
  std::iota(row.begin(), row.end(), std::size_t{0});
  for (std::size_t i = 0; i < from.size(); ++i) {
    std::size_t diagonal = std::exchange(row[0], i + 1);
    for (std::size_t j = 0; j < to.size(); ++j) {
      const std::size_t replaced = diagonal + (from[i] == to[j] ? 0 : 1);
      diagonal = std::exchange(row[j + 1], std::min({row[j] + 1, row[j + 1] + 1, replaced}));
    }
  }
  return row.back();
}

}  // namespace evmm
