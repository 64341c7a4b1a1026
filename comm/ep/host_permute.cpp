// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/host_permute.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

namespace evmm::ep {

namespace {

/// Calls `visit(place)` for each place that holds a received row, in order.
template <class Visit>
void for_rows(const row_blocks& rows, Visit&& visit) {
  for (int block = 0; block < rows.blocks; ++block) {
    for (int i = 0; i < rows.filled[block]; ++i) {
      visit(static_cast<std::size_t>(block * rows.stride + i));
    }
  }
}

/// Calls `visit(at, row)` for each choice of the row at `place`: its index among all, and its row
/// in the layout by expert.
template <class Visit>
void for_choices(const ep_shape& shape, const expert_layout& in, std::size_t place, Visit&& visit) {
  const auto top_k = static_cast<std::size_t>(shape.top_k);
  for (std::size_t at = place * top_k; at < (place + 1) * top_k; ++at) {
    if (shape.at<std::int32_t>(shape.rank, shape.experts)[at] < 0) continue;
    if (in.expert_rows[at] < 0) continue;
    visit(at, static_cast<std::size_t>(in.expert_rows[at]));
  }
}

}  // namespace

void host_place(const ep_shape& shape, const expert_layout& to) {
  const auto experts = static_cast<std::size_t>(shape.local_experts);
  const auto* const chosen = shape.at<std::int32_t>(shape.rank, shape.experts);
  const auto top_k = static_cast<std::size_t>(shape.top_k);
  std::vector<std::int32_t> count(experts);
  const auto for_all = [&](auto&& visit) {
    for_rows(to.rows, [&](std::size_t place) {
      for (std::size_t at = place * top_k; at < (place + 1) * top_k; ++at) {
        if (chosen[at] >= 0) visit(at, static_cast<std::size_t>(chosen[at]));
      }
    });
  };
  for_all([&](std::size_t, std::size_t expert) { ++count[expert]; });
  // Groups of a fixed size have room for every token once.
  if (to.stride != 0) {
    for (std::int32_t& rows : count) rows = std::min(rows, to.stride);
  }
  std::int32_t end = 0;
  for (std::size_t e = 0; e < experts; ++e) {
    to.begin[e] = to.stride == 0 ? end : static_cast<std::int32_t>(e) * to.stride;
    end = to.begin[e] + (count[e] + to.alignment - 1) / to.alignment * to.alignment;
    std::fill(to.row_experts + to.begin[e] + count[e], to.row_experts + end, -1);
    std::fill(to.row_places + to.begin[e] + count[e], to.row_places + end, -1);
    if (to.stride != 0) to.expert_tokens[e] = count[e];
  }
  to.begin[experts] = end;
  host_raise(to.most_rows_on_host, static_cast<std::uint64_t>(end));
  std::vector<std::int32_t> next(to.begin, to.begin + experts);
  for_all([&](std::size_t at, std::size_t expert) {
    const std::int32_t row = next[expert];
    const bool fits = to.stride == 0 || row < to.begin[expert] + to.stride;
    if (fits) {
      to.row_experts[row] = static_cast<std::int32_t>(expert);
      to.row_places[row] = static_cast<std::int32_t>(at / top_k);
      ++next[expert];
    }
    to.expert_rows[at] = fits ? row : -1;
  });
}

void host_permute(const ep_shape& shape, const expert_layout& to) {
  const auto scale_count = static_cast<std::size_t>(shape.scale_count);
  for_rows(to.rows, [&](std::size_t place) {
    for_choices(shape, to, place, [&](std::size_t, std::size_t row) {
      std::memcpy(to.x + row * shape.row_bytes,
                  shape.at<char>(shape.rank, shape.x) + place * shape.row_bytes, shape.row_bytes);
      std::copy_n(shape.at<float>(shape.rank, shape.scales) + place * scale_count, scale_count,
                  to.scales + row * scale_count);
    });
  });
}

void host_unpermute(const ep_shape& shape, const expert_layout& from, bool weighted) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  std::vector<float> sum(hidden);
  for_rows(from.rows, [&](std::size_t place) {
    std::fill(sum.begin(), sum.end(), 0.0f);
    for_choices(shape, from, place, [&](std::size_t at, std::size_t row) {
      const float weight = weighted ? shape.at<float>(shape.rank, shape.weights)[at] : 1;
      const bf16* const y = reinterpret_cast<const bf16*>(from.y) + row * hidden;
      for (std::size_t i = 0; i < hidden; ++i) sum[i] = std::fma(to_float(y[i]), weight, sum[i]);
    });
    bf16* const y = shape.at<bf16>(shape.rank, shape.y) + place * hidden;
    for (std::size_t i = 0; i < hidden; ++i) y[i] = to_bf16(sum[i]);
  });
}

void host_permute_gradients(const ep_shape& shape, const expert_layout& to, const bf16* outputs) {
  const auto hidden = static_cast<std::size_t>(shape.hidden);
  const auto top_k = static_cast<std::size_t>(shape.top_k);
  for_rows(to.rows, [&](std::size_t place) {
    if (outputs != nullptr) std::fill_n(to.weight_gradients + place * top_k, top_k, 0.0f);
    for_choices(shape, to, place, [&](std::size_t at, std::size_t row) {
      const float weight = shape.at<float>(shape.rank, shape.weights)[at];
      const bf16* const y = shape.at<bf16>(shape.rank, shape.y) + place * hidden;
      float dot = 0;
      for (std::size_t i = 0; i < hidden; ++i) {
        const float gradient = to_float(y[i]);
        reinterpret_cast<bf16*>(to.y)[row * hidden + i] = to_bf16(gradient * weight);
        if (outputs != nullptr) dot += gradient * to_float(outputs[row * hidden + i]);
      }
      if (outputs != nullptr) to.weight_gradients[at] = dot;
    });
  });
}

}  // namespace evmm::ep
