// SPDX-License-Identifier: Apache-2.0
#include "routing.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>
#include <zlib.h>

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <filesystem>
#include <memory>
#include <numeric>
#include <random>

namespace moe {

namespace {

constexpr std::string_view k_blanks = " \t";
constexpr const char* k_format = "a line is `id id ...,weight weight ...`, one token a line";

/// Splits at runs of blanks.
std::vector<std::string_view> words(std::string_view text) {
  std::vector<std::string_view> found;
  for (std::size_t at = text.find_first_not_of(k_blanks); at != text.npos;) {
    const std::size_t end = std::min(text.find_first_of(k_blanks, at), text.size());
    found.push_back(text.substr(at, end - at));
    at = text.find_first_not_of(k_blanks, end);
  }
  return found;
}

template <class Number>
bool read_number(std::string_view word, Number& value) {
  const auto [end, failure] = std::from_chars(word.data(), word.data() + word.size(), value);
  return failure == std::errc{} && end == word.data() + word.size();
}

/// Parses one file; knows where it is, so that a refusal can say so.
class parser {
 public:
  parser(const std::string& name, int experts) : name_(name), limit_(experts) {
    made_.source = name;
    made_.experts = experts;
  }

  void line(std::string_view text) {
    ++line_;
    if (!text.empty() && text.back() == '\r') text.remove_suffix(1);
    const std::size_t start = text.find_first_not_of(k_blanks);
    if (start == text.npos || text[start] == '#') return;
    const std::size_t comma = text.find(',');
    if (comma == text.npos) refuse("there is no comma between ids and weights");
    if (text.find(',', comma + 1) != text.npos) refuse("there is more than one comma");
    token(words(text.substr(0, comma)), words(text.substr(comma + 1)));
  }

  routing finish() {
    if (made_.ids.empty()) {
      throw evmm::invalid_argument(fmt::format("{}: there is no token in it", name_), k_format);
    }
    return std::move(made_);
  }

 private:
  void token(const std::vector<std::string_view>& ids,
             const std::vector<std::string_view>& weights) {
    if (ids.empty()) refuse("there is no expert id before the comma");
    if (ids.size() != weights.size()) {
      refuse(fmt::format("{} expert ids, but {} weights", ids.size(), weights.size()));
    }
    if (made_.top_k == 0) made_.top_k = static_cast<int>(ids.size());
    if (ids.size() != static_cast<std::size_t>(made_.top_k)) {
      refuse(fmt::format("{} experts, but the tokens before have {}", ids.size(), made_.top_k));
    }
    const std::size_t first = made_.ids.size();
    for (const auto word : ids) add_id(word, first);
    for (const auto word : weights) add_weight(word);
  }

  void add_id(std::string_view word, std::size_t first) {
    // Far more experts than any model has; keeps a typing error from reserving a terabyte.
    constexpr int most = 1 << 16;
    int id = 0;
    if (!read_number(word, id) || id < 0 || id >= most) {
      refuse(fmt::format("'{}' is not an expert id from 0 to {}", word, most - 1));
    }
    if (limit_ != 0 && id >= limit_) {
      refuse(fmt::format("expert {} is beyond the {} experts asked for", id, limit_));
    }
    if (std::find(made_.ids.begin() + static_cast<std::ptrdiff_t>(first), made_.ids.end(), id) !=
        made_.ids.end()) {
      refuse(fmt::format("expert {} is named twice", id));
    }
    made_.ids.push_back(id);
    if (limit_ == 0) made_.experts = std::max(made_.experts, id + 1);
  }

  void add_weight(std::string_view word) {
    float weight = 0;
    if (!read_number(word, weight) || !std::isfinite(weight) || weight < 0) {
      refuse(fmt::format("'{}' is not a weight (a finite number, at least 0)", word));
    }
    made_.weights.push_back(weight);
  }

  [[noreturn]] void refuse(const std::string& why) const {
    throw evmm::invalid_argument(fmt::format("{}:{}: {}", name_, line_, why), k_format);
  }

  const std::string& name_;
  int limit_;
  std::size_t line_ = 0;
  routing made_;
};

/// The whole file; zlib reads plain files as they are.
std::string read_text(const std::string& path) {
  const std::unique_ptr<gzFile_s, int (*)(gzFile)> file(gzopen(path.c_str(), "rb"), gzclose);
  if (!file) {
    throw evmm::invalid_argument(fmt::format("{}: cannot be opened", path), "check --routing",
                                 errno);
  }
  std::string text;
  std::array<char, 1 << 16> buffer;
  int got = 0;
  while ((got = gzread(file.get(), buffer.data(), buffer.size())) > 0) {
    text.append(buffer.data(), static_cast<std::size_t>(got));
  }
  int status = Z_OK;
  const char* why = gzerror(file.get(), &status);
  // A file that ends in the middle of the compressed stream is seen only here.
  if (got < 0 || status != Z_OK) {
    throw evmm::invalid_argument(fmt::format("{}: cannot be read to its end: {}", path, why),
                                 "is it complete?", status);
  }
  return text;
}

}  // namespace

routing parse_routing(std::string_view text, const std::string& name, int experts) {
  parser reader(name, experts);
  while (!text.empty()) {
    const std::size_t end = std::min(text.find('\n'), text.size());
    reader.line(text.substr(0, end));
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return reader.finish();
}

routing read_routing(const std::string& path, int experts) {
  routing made = parse_routing(read_text(path), path, experts);
  made.source = std::filesystem::path(path).filename();
  return made;
}

routing generate_routing(const routing_recipe& recipe) {
  if (recipe.experts < 1 || recipe.top_k < 1 || recipe.top_k > recipe.experts) {
    throw evmm::invalid_argument(fmt::format("top-{} of {} experts", recipe.top_k, recipe.experts),
                                 "--top-k is at least 1 and at most --experts");
  }
  routing made;
  made.source = fmt::format("generated: skew {}, seed {}", recipe.skew, recipe.seed);
  made.experts = recipe.experts;
  made.top_k = recipe.top_k;

  std::mt19937_64 random(recipe.seed);
  const auto uniform = [&] {  // in (0, 1); the standard's own differs between libraries
    return (static_cast<double>(random() >> 11) + 0.5) * 0x1.0p-53;
  };
  const auto experts = static_cast<std::size_t>(recipe.experts);
  const auto top_k = static_cast<std::size_t>(recipe.top_k);
  std::vector<double> score(experts);
  std::vector<std::int32_t> order(experts);
  for (std::size_t token = 0; token < recipe.tokens; ++token) {
    // Log-popularity plus Gumbel noise: the best k are a draw without repetition, and the scores
    // look like a router's logits.
    for (std::size_t e = 0; e < experts; ++e) {
      score[e] =
          -recipe.skew * std::log(static_cast<double>(e + 1)) - std::log(-std::log(uniform()));
    }
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(
        order.begin(), order.begin() + recipe.top_k, order.end(), [&](auto a, auto b) {
          return score[static_cast<std::size_t>(a)] > score[static_cast<std::size_t>(b)];
        });
    double sum = 0;
    const double best = score[static_cast<std::size_t>(order[0])];
    for (std::size_t k = 0; k < top_k; ++k) {
      sum += std::exp(score[static_cast<std::size_t>(order[k])] - best);
    }
    for (std::size_t k = 0; k < top_k; ++k) {
      made.ids.push_back(order[k]);
      made.weights.push_back(
          static_cast<float>(std::exp(score[static_cast<std::size_t>(order[k])] - best) / sum));
    }
  }
  return made;
}

}  // namespace moe
