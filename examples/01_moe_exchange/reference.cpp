// SPDX-License-Identifier: Apache-2.0
#include "reference.hpp"

#include <algorithm>

namespace moe {

std::vector<bf16> make_tokens(std::uint64_t seed, const token_slice& slice, int hidden) {
  std::vector<bf16> made;
  made.reserve(slice.count * static_cast<std::size_t>(hidden));
  for (std::size_t t = 0; t < slice.count; ++t) {
    for (int column = 0; column < hidden; ++column) {
      made.push_back(token_value(seed, slice.first + t, column));
    }
  }
  return made;
}

std::vector<bf16> reference_outputs(std::span<const bf16> tokens, std::span<const std::int32_t> ids,
                                    std::span<const float> weights, int top_k, int hidden) {
  const auto width = static_cast<std::size_t>(hidden);
  const auto choices = static_cast<std::size_t>(top_k);
  const std::size_t count = ids.size() / choices;
  std::vector<bf16> outputs(count * width);
  std::vector<float> sum(width);
  for (std::size_t t = 0; t < count; ++t) {
    const auto x = tokens.subspan(t * width, width);
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (std::size_t k = 0; k < choices; ++k) {
      const auto expert = stand_in_expert::of(ids[t * choices + k]);
      const float weight = weights[t * choices + k];
      for (std::size_t c = 0; c < width; ++c) sum[c] = accumulate(sum[c], weight, expert(x[c]));
    }
    for (std::size_t c = 0; c < width; ++c) outputs[t * width + c] = to_bf16(sum[c]);
  }
  return outputs;
}

std::size_t count_mismatches(std::span<const bf16> got, std::span<const bf16> expected) {
  if (got.size() != expected.size()) return std::max(got.size(), expected.size());
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < got.size(); ++i) wrong += got[i] == expected[i] ? 0 : 1;
  return wrong;
}

}  // namespace moe
