// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/host_rows.hpp"

#include "comm/ep/bf16.hpp"
#include "comm/ep/fp8.hpp"

#include <algorithm>
#include <cmath>

namespace evmm::ep {

void quantize_row(const void* row, char* made, std::span<float> scales) {
  for (std::size_t g = 0; g < scales.size(); ++g) {
    const bf16* const group = static_cast<const bf16*>(row) + g * k_scale_elements;
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
    quantize_row(given, row_.data(), scales_);
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

void host_combine(const ep_shape& shape, int count, const plan_arrays& by, const combine_output& to,
                  std::uint64_t without) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  std::vector<float> sum(hidden);
  for (int t = 0; t < count; ++t) {
    const std::size_t begin = static_cast<std::size_t>(t) * hidden;
    for (std::size_t i = 0; i < hidden; ++i) {
      sum[i] = to.bias == nullptr ? 0 : to_float(static_cast<const bf16*>(to.bias)[begin + i]);
    }
    const auto row_at = [&](int r) {
      return static_cast<std::size_t>(by.first[r] + by.places[t * shape.ranks + r]);
    };
    for (int r = 0; r < shape.ranks; ++r) {
      if (((by.masks[t] & ~without) >> r & 1) == 0) continue;
      const bf16* y = shape.at<bf16>(r, shape.y) + row_at(r) * hidden;
      for (std::size_t i = 0; i < hidden; ++i) sum[i] += to_float(y[i]);
    }
    for (std::size_t i = 0; i < hidden; ++i) {
      static_cast<bf16*>(to.sums)[begin + i] = to_bf16(sum[i]);
    }
    for (int k = 0; k < shape.top_k && to.weight_gradients != nullptr; ++k) {
      const int at = t * shape.top_k + k;
      const std::int64_t expert = to.ids[at];
      const bool chosen = expert >= 0 && expert < shape.ranks * shape.local_experts;
      const int r = chosen ? static_cast<int>(expert) / shape.local_experts : 0;
      const std::size_t there = row_at(r) * static_cast<std::size_t>(shape.top_k);
      to.weight_gradients[at] =
          chosen ? shape.at<float>(r, shape.weight_gradients)[there + static_cast<std::size_t>(k)]
                 : 0;
    }
  }
}

}  // namespace evmm::ep
