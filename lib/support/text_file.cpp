// SPDX-License-Identifier: Apache-2.0
#include "lib/support/text_file.hpp"

#include <algorithm>
#include <fstream>
#include <sstream>

namespace evmm {

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::ostringstream text;
  // What opens and cannot be read is bad; nothing to read would be a failure of `text`.
  if (file.peek() != std::ifstream::traits_type::eof()) text << file.rdbuf();
  if (file.bad() || text.fail()) return std::nullopt;
  return text.str();
}

std::optional<std::string> read_line(const std::string& path) {
  auto text = read_text(path);
  if (text) text->resize(std::min(text->size(), text->find('\n')));
  return text;
}

}  // namespace evmm
