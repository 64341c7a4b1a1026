// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/host_rows.hpp"

#include "comm/ep/bf16.hpp"
#include "comm/ep/fp8.hpp"

#include <algorithm>
#include <cmath>

namespace evmm::ep {

namespace {

void quantize(const bf16* row, std::vector<char>& made, std::vector<float>& scales) {
  for (std::size_t g = 0; g < scales.size(); ++g) {
    const bf16* const group = row + g * k_scale_elements;
    float amax = k_least_amax;
    for (std::size_t i = 0; i < k_scale_elements; ++i) {
      amax = std::max(amax, std::fabs(to_float(group[i])));
    }
    scales[g] = amax / k_fp8_most;
    const float by = k_fp8_most / amax;
    for (std::size_t i = 0; i < k_scale_elements; ++i) {
      made[g * k_scale_elements + i] = static_cast<char>(to_fp8(to_float(group[i]) * by));
    }
  }
}

}  // namespace

std::uint64_t ranks_of(const ep_shape& shape, const token_arrays& from, int t,
                       const ep_totals& totals) {
  std::uint64_t mask = 0;
  for (int k = 0; k < shape.top_k; ++k) {
    const std::int64_t expert = from.ids[t * shape.top_k + k];
    if (expert < 0) continue;
    if (expert < shape.ranks * shape.local_experts) {
      mask |= std::uint64_t{1} << (expert / shape.local_experts);
    } else {
      signal(totals.wrong_on_host, static_cast<std::uint64_t>(expert) + 1);
    }
  }
  return mask;
}

host_row::host_row(const ep_shape& shape)
    : shape_(shape), row_(shape.row_bytes), scales_(static_cast<std::size_t>(shape.scale_count)) {}

void host_row::load(const token_arrays& from, int t) {
  const auto token = static_cast<std::size_t>(t);
  const char* const given = from.x + token * shape_.given_bytes();
  if (shape_.quantize) {
    quantize(reinterpret_cast<const bf16*>(given), row_, scales_);
    return;
  }
  std::copy_n(given, row_.size(), row_.data());
  if (!scales_.empty()) {
    std::copy_n(from.scales + token * scales_.size(), scales_.size(), scales_.data());
  }
}

void host_row::store(const token_arrays& from, int t, int r, std::size_t to) const {
  std::copy(row_.begin(), row_.end(), shape_.at<char>(r, shape_.x) + to * row_.size());
  std::copy(scales_.begin(), scales_.end(),
            shape_.at<float>(r, shape_.scales) + to * scales_.size());
  shape_.at<std::int32_t>(r, shape_.tokens)[to] = t;
  for (int k = 0; k < shape_.top_k; ++k) {
    const int choice = t * shape_.top_k + k;
    const std::int64_t expert = from.ids[choice];
    const bool here = expert >= 0 && expert / shape_.local_experts == r;
    const auto at = to * static_cast<std::size_t>(shape_.top_k) + static_cast<std::size_t>(k);
    const float weight = from.weights == nullptr ? 1 : from.weights[choice];
    shape_.at<std::int32_t>(r, shape_.experts)[at] =
        here ? static_cast<std::int32_t>(expert % shape_.local_experts) : -1;
    shape_.at<float>(r, shape_.weights)[at] = here ? weight : 0;
  }
}

}  // namespace evmm::ep
