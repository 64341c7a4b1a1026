// SPDX-License-Identifier: Apache-2.0
#include "lib/support/text_file.hpp"

#include <algorithm>
#include <fstream>
#include <iterator>

namespace evmm {

std::optional<std::string> read_text(const std::string& path) {
  std::ifstream file(path);
  if (!file) return std::nullopt;
  std::string text(std::istreambuf_iterator<char>(file), {});
  if (file.bad()) return std::nullopt;
  return text;
}

std::optional<std::string> read_line(const std::string& path) {
  auto text = read_text(path);
  if (text) text->resize(std::min(text->size(), text->find('\n')));
  return text;
}

}  // namespace evmm
