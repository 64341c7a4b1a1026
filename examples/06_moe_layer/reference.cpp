// SPDX-License-Identifier: Apache-2.0
#include "reference.hpp"

#include <algorithm>
#include <cmath>
#include <thread>

namespace moe {

namespace {

using matrix = std::vector<float>;

matrix widened(const std::vector<bf16>& values) {
  matrix wide(values.size());
  std::transform(values.begin(), values.end(), wide.begin(), to_float);
  return wide;
}

/// [rows][columns] to [columns][rows].
matrix transposed(const matrix& from, std::size_t rows, std::size_t columns) {
  matrix to(from.size());
  for (std::size_t r = 0; r < rows; ++r) {
    for (std::size_t c = 0; c < columns; ++c) to[c * rows + r] = from[r * columns + c];
  }
  return to;
}

/// a [m][k] times b [k][n].
matrix product(const matrix& a, const matrix& b, std::size_t m, std::size_t k, std::size_t n,
               unsigned threads) {
  matrix c(m * n);
  const auto some_rows = [&](std::size_t first, std::size_t last) {
    for (std::size_t r = first; r < last; ++r) {
      float* const to = c.data() + r * n;
      for (std::size_t i = 0; i < k; ++i) {
        const float factor = a[r * k + i];
        const float* const row = b.data() + i * n;
        for (std::size_t j = 0; j < n; ++j) to[j] += factor * row[j];
      }
    }
  };
  // A thread is worth it for a few milliseconds of work.
  const std::size_t parts = std::clamp<std::size_t>(m * n * k >> 24, 1, threads);
  std::vector<std::thread> others;
  for (std::size_t p = 1; p < parts; ++p) {
    others.emplace_back(some_rows, m * p / parts, m * (p + 1) / parts);
  }
  some_rows(0, m / parts);
  for (std::thread& one : others) one.join();
  return c;
}

}  // namespace

/// The rows that chose an expert, side by side, and what it makes of them.
struct dense_reference::rows {
  struct source {
    std::size_t rank, token, choice;
  };
  std::vector<source> from;
  std::vector<float> weights;
  matrix x, of_y;     ///< [rows][hidden]; of_y is the token's gradient, without the weight
  matrix y, of_x;     ///< [rows][hidden]
  matrix activated;   ///< [rows][intermediate]
  matrix of_gate_up;  ///< [rows][2 x intermediate]
};

dense_reference::rows dense_reference::rows_of(std::size_t expert,
                                               std::span<const routed_tokens> all) const {
  rows found;
  const auto append = [&](matrix& to, const std::vector<bf16>& from, std::size_t token) {
    for (std::size_t i = 0; i < shape_.hidden; ++i) {
      to.push_back(to_float(from[token * shape_.hidden + i]));
    }
  };
  for (std::size_t rank = 0; rank < all.size(); ++rank) {
    const routed_tokens& of = all[rank];
    for (std::size_t at = 0; at < of.ids.size(); ++at) {
      if (of.ids[at] != static_cast<std::int64_t>(expert)) continue;
      const std::size_t token = at / shape_.top_k;
      found.from.push_back({rank, token, at % shape_.top_k});
      found.weights.push_back(of.weights[at]);
      append(found.x, of.x, token);
      append(found.of_y, of.of_y, token);
    }
  }
  return found;
}

/// Forward, and back to the rows.
void dense_reference::run(rows& on, std::size_t expert) const {
  const std::size_t count = on.from.size();
  const std::size_t h = shape_.hidden;
  const std::size_t w = shape_.intermediate;
  const matrix gate_up_weights = widened(data_.gate_up(expert));
  const matrix down_weights = widened(data_.down(expert));

  const matrix gate_up =
      product(on.x, transposed(gate_up_weights, 2 * w, h), count, h, 2 * w, threads_);
  on.activated.resize(count * w);
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t i = 0; i < w; ++i) {
      const float gate = gate_up[r * 2 * w + i];
      const float up = gate_up[r * 2 * w + w + i];
      on.activated[r * w + i] = gate * up / (1 + std::exp(-gate));
    }
  }
  on.y = product(on.activated, transposed(down_weights, h, w), count, w, h, threads_);

  matrix of_activated = product(on.of_y, down_weights, count, h, w, threads_);
  on.of_gate_up.resize(count * 2 * w);
  for (std::size_t r = 0; r < count; ++r) {
    for (std::size_t i = 0; i < w; ++i) {
      const float gate = gate_up[r * 2 * w + i];
      const float up = gate_up[r * 2 * w + w + i];
      const float gradient = of_activated[r * w + i] * on.weights[r];
      const float gated = 1 / (1 + std::exp(-gate));
      const float slope = gated + gate * gated * (1 - gated);  // of silu
      on.of_gate_up[r * 2 * w + i] = gradient * up * slope;
      on.of_gate_up[r * 2 * w + w + i] = gradient * gate * gated;
    }
  }
  on.of_x = product(on.of_gate_up, gate_up_weights, count, 2 * w, h, threads_);
}

std::vector<double> dense_reference::logits(const std::vector<bf16>& x,
                                            const std::vector<float>& bias) const {
  const std::vector<bf16> router = data_.router();
  std::vector<double> all(shape_.tokens * shape_.experts);
  for (std::size_t at = 0; at < all.size(); ++at) {
    const bf16* const token = &x[at / shape_.experts * shape_.hidden];
    const bf16* const weights = &router[at % shape_.experts * shape_.hidden];
    double sum = static_cast<double>(bias[at % shape_.experts]);
    for (std::size_t i = 0; i < shape_.hidden; ++i) {
      sum += static_cast<double>(to_float(token[i])) * static_cast<double>(to_float(weights[i]));
    }
    all[at] = sum;
  }
  return all;
}

token_results dense_reference::of_tokens(const routed_tokens& mine,
                                         const std::vector<float>& of_weights_computed) const {
  const std::size_t h = shape_.hidden;
  token_results made;
  made.y.resize(shape_.tokens * h);
  made.of_x.resize(shape_.tokens * h);
  made.of_weights.resize(shape_.tokens * shape_.top_k);
  for (std::size_t expert = 0; expert < shape_.experts; ++expert) {
    rows on = rows_of(expert, {&mine, 1});
    run(on, expert);
    for (std::size_t r = 0; r < on.from.size(); ++r) {
      const std::size_t token = on.from[r].token;
      float dot = 0;
      for (std::size_t i = 0; i < h; ++i) {
        made.y[token * h + i] += on.weights[r] * on.y[r * h + i];
        made.of_x[token * h + i] += on.of_x[r * h + i];
        dot += on.of_y[r * h + i] * on.y[r * h + i];
      }
      made.of_weights[token * shape_.top_k + on.from[r].choice] = dot;
    }
  }

  // The weights are a softmax over the chosen logits.
  matrix of_logits(shape_.tokens * shape_.experts);
  for (std::size_t token = 0; token < shape_.tokens; ++token) {
    const std::size_t first = token * shape_.top_k;
    float mean = 0;
    for (std::size_t at = first; at < first + shape_.top_k; ++at) {
      mean += mine.weights[at] * of_weights_computed[at];
    }
    for (std::size_t at = first; at < first + shape_.top_k; ++at) {
      of_logits[token * shape_.experts + static_cast<std::size_t>(mine.ids[at])] =
          mine.weights[at] * (of_weights_computed[at] - mean);
    }
  }
  const matrix by_router =
      product(of_logits, widened(data_.router()), shape_.tokens, shape_.experts, h, threads_);
  for (std::size_t i = 0; i < by_router.size(); ++i) made.of_x[i] += by_router[i];
  made.of_router = product(transposed(of_logits, shape_.tokens, shape_.experts), widened(mine.x),
                           shape_.experts, shape_.tokens, h, threads_);
  return made;
}

weight_results dense_reference::of_expert(std::size_t expert,
                                          std::span<const routed_tokens> all) const {
  rows on = rows_of(expert, all);
  run(on, expert);
  const std::size_t count = on.from.size();
  const std::size_t h = shape_.hidden;
  const std::size_t w = shape_.intermediate;
  for (std::size_t i = 0; i < on.of_y.size(); ++i) on.of_y[i] *= on.weights[i / h];
  return {.of_gate_up =
              product(transposed(on.of_gate_up, count, 2 * w), on.x, 2 * w, count, h, threads_),
          .of_down = product(transposed(on.of_y, count, h), on.activated, h, count, w, threads_)};
}

}  // namespace moe
