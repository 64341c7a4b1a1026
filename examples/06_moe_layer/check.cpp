// SPDX-License-Identifier: Apache-2.0
#include "check.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <span>

namespace moe {

namespace {

constexpr double k_wrong = std::numeric_limits<double>::infinity();

/// The larger error; one that is no number counts as infinite.
double worse(double most, double error) {
  if (!std::isfinite(error)) return k_wrong;
  return std::max(most, error);
}

double value_of(float value) {
  return static_cast<double>(value);
}
double value_of(bf16 value) {
  return static_cast<double>(to_float(value));
}

/// The largest error of `got`, whose parts of `size` have a scale of their own. See check.hpp.
template <class T>
double error_of(std::span<const T> got, const std::vector<float>& expected, std::size_t size) {
  if (got.size() != expected.size()) return k_wrong;
  double most = 0;
  for (std::size_t first = 0; first < got.size(); first += size) {
    double squares = 0;
    for (std::size_t i = first; i < first + size; ++i) {
      squares += value_of(expected[i]) * value_of(expected[i]);
    }
    const double rms = std::sqrt(squares / static_cast<double>(size));
    for (std::size_t i = first; i < first + size; ++i) {
      const double error = std::fabs(value_of(got[i]) - value_of(expected[i]));
      if (error == 0) continue;  // where the scale is 0: what nobody chose has a gradient of 0
      most = worse(most, error / (rms + std::fabs(value_of(expected[i]))));
    }
  }
  return most;
}

template <class T>
double error_of(const std::vector<T>& got, const std::vector<float>& expected, std::size_t size) {
  return error_of(std::span<const T>(got), expected, size);
}

}  // namespace

double routing_error(const layer_shape& shape, const std::vector<double>& logits,
                     const routed_tokens& mine) {
  double most = 0;
  for (std::size_t t = 0; t < shape.tokens; ++t) {
    const std::span of(&logits[t * shape.experts], shape.experts);
    std::vector<bool> chosen(shape.experts);
    double least = k_wrong;
    double sum = 0;
    for (std::size_t at = t * shape.top_k; at < (t + 1) * shape.top_k; ++at) {
      const auto id = static_cast<std::size_t>(mine.ids[at]);
      if (id >= shape.experts || chosen[id]) return k_wrong;
      chosen[id] = true;
      least = std::min(least, of[id]);
      sum += std::exp(of[id]);
    }
    for (std::size_t at = t * shape.top_k; at < (t + 1) * shape.top_k; ++at) {
      const double weight = std::exp(of[static_cast<std::size_t>(mine.ids[at])]) / sum;
      most = worse(most, std::fabs(value_of(mine.weights[at]) - weight));
    }
    // Two logits that are equal but for rounding may be chosen either way.
    for (std::size_t e = 0; e < shape.experts; ++e) {
      if (!chosen[e]) most = std::max(most, of[e] - least);
    }
  }
  return most;
}

void compare(const moe_layer& layer, const layer_shape& shape, const dense_reference& reference,
             const std::vector<routed_tokens>& all, int rank, const std::vector<bf16>& y,
             const std::vector<bf16>& of_x, errors& found) {
  const auto see = [&](quantity what, double error) { found[what] = std::max(found[what], error); };
  const std::vector<float> of_weights = layer.weight_gradients().read();
  const token_results expected =
      reference.of_tokens(all[static_cast<std::size_t>(rank)], of_weights);
  see(output, error_of(y, expected.y, shape.hidden));
  see(of_token, error_of(of_x, expected.of_x, shape.hidden));
  see(of_routing_weight, error_of(of_weights, expected.of_weights, of_weights.size()));
  see(of_router, error_of(layer.router_gradient().read(), expected.of_router, shape.hidden));

  const std::vector<float> gate_up = layer.gate_up_gradient().read();
  const std::vector<float> down = layer.down_gradient().read();
  for (std::size_t e = 0; e < layer.local_experts(); ++e) {
    const weight_results of = reference.of_expert(layer.first_expert() + e, all);
    const auto part = [&](const std::vector<float>& from, std::size_t size) {
      return std::span(from).subspan(e * size, size);
    };
    see(of_gate_up,
        error_of(part(gate_up, shape.gate_up_size()), of.of_gate_up, of.of_gate_up.size()));
    see(of_down, error_of(part(down, shape.down_size()), of.of_down, of.of_down.size()));
  }
}

}  // namespace moe
