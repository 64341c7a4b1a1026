// SPDX-License-Identifier: Apache-2.0
#include "layer_math.hpp"

#include <algorithm>
#include <numeric>
#include <utility>
#include <vector>

namespace moe {

namespace {

/// The experts of one token: the largest logits, the lower id where two are equal.
void choose(const routing_call& call, const float* logits, std::int64_t* ids, float* weights) {
  std::vector<std::int64_t> order(call.router.outputs);
  std::iota(order.begin(), order.end(), 0);
  const auto end = order.begin() + static_cast<std::ptrdiff_t>(call.top_k);
  std::partial_sort(order.begin(), end, order.end(), [&](std::int64_t a, std::int64_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  });
  std::copy(order.begin(), end, ids);
  float sum = 0;
  for (std::size_t k = 0; k < call.top_k; ++k) {
    weights[k] = std::exp(logits[ids[k]] - logits[ids[0]]);
    sum += weights[k];
  }
  for (std::size_t k = 0; k < call.top_k; ++k) weights[k] /= sum;
}

/// A group's weights in FP32; transposed, [inputs][outputs].
std::vector<float> transposed(const bf16* weights, const grouped_linear& layer) {
  std::vector<float> values(layer.inputs * layer.outputs);
  for (std::size_t o = 0; o < layer.outputs; ++o) {
    for (std::size_t i = 0; i < layer.inputs; ++i) {
      values[i * layer.outputs + o] = to_float(weights[o * layer.inputs + i]);
    }
  }
  return values;
}

std::vector<float> widened(const bf16* values, std::size_t count) {
  std::vector<float> wide(count);
  std::transform(values, values + count, wide.begin(), to_float);
  return wide;
}

/// sum[0..n) += factor x values[0..n)
void add_scaled(float* sum, float factor, const float* values, std::size_t n) {
  for (std::size_t i = 0; i < n; ++i) sum[i] += factor * values[i];
}

/// Plain loops, as host functions in the order of the stream.
class cpu_math final : public layer_math {
 public:
  explicit cpu_math(device_memory& memory) : memory_(memory) {}

  std::string name() const override { return "plain loops on the CPU"; }

  void route(const routing_call& call) override {
    enqueue([call] {
      const std::size_t experts = call.router.outputs;
      const std::vector<float> router = transposed(call.router.weights, call.router);
      for (std::size_t t = 0; t < call.tokens; ++t) {
        float* const logits = call.logits + t * experts;
        std::copy_n(call.bias, experts, logits);
        for (std::size_t i = 0; i < call.router.inputs; ++i) {
          add_scaled(logits, to_float(call.x[t * call.router.inputs + i]), &router[i * experts],
                     experts);
        }
        choose(call, logits, call.ids + t * call.top_k, call.weights + t * call.top_k);
      }
    });
  }

  void route_backward(const routing_call& call, const float* of_weights, bf16* of_logits) override {
    enqueue([call, of_weights, of_logits] {
      std::fill_n(of_logits, call.tokens * call.router.outputs, bf16{});
      for (std::size_t t = 0; t < call.tokens; ++t) {
        const float* const w = call.weights + t * call.top_k;
        const float* const of_w = of_weights + t * call.top_k;
        const float mean = std::inner_product(w, w + call.top_k, of_w, 0.0f);
        for (std::size_t k = 0; k < call.top_k; ++k) {
          const auto id = static_cast<std::size_t>(call.ids[t * call.top_k + k]);
          of_logits[t * call.router.outputs + id] = to_bf16(w[k] * (of_w[k] - mean));
        }
      }
    });
  }

  void forward(std::span<const row_group> groups, const grouped_linear& layer, const bf16* x,
               bf16* y) override {
    for_groups(
        groups,
        [layer, x, y](row_group group, std::size_t size, std::size_t at) {
          const std::vector<float> weights = transposed(layer.weights + at * size, layer);
          multiply(group, weights, layer.inputs, layer.outputs, x, y, false);
        },
        layer);
  }

  void backward_inputs(std::span<const row_group> groups, const grouped_linear& layer,
                       const bf16* of_y, bf16* of_x, bool add) override {
    for_groups(
        groups,
        [layer, of_y, of_x, add](row_group group, std::size_t size, std::size_t at) {
          const std::vector<float> weights = widened(layer.weights + at * size, size);
          multiply(group, weights, layer.outputs, layer.inputs, of_y, of_x, add);
        },
        layer);
  }

  void backward_weights(std::span<const row_group> groups, const grouped_linear& layer,
                        const bf16* of_y, const bf16* x, float* of_weights) override {
    for_groups(
        groups,
        [layer, of_y, x, of_weights](row_group group, std::size_t size, std::size_t at) {
          float* const to = of_weights + at * size;
          std::fill_n(to, size, 0.0f);
          for (std::size_t r = group.begin; r < group.begin + group.rows; ++r) {
            const std::vector<float> row = widened(x + r * layer.inputs, layer.inputs);
            for (std::size_t o = 0; o < layer.outputs; ++o) {
              add_scaled(to + o * layer.inputs, to_float(of_y[r * layer.outputs + o]), row.data(),
                         layer.inputs);
            }
          }
        },
        layer);
  }

  void activate(std::size_t rows, std::size_t width, const bf16* gate_up, bf16* out) override {
    enqueue([=] {
      for (std::size_t at = 0; at < rows * width; ++at) {
        const bf16* const gate = gate_up + at / width * 2 * width + at % width;
        out[at] = to_bf16(swiglu(to_float(gate[0]), to_float(gate[width])));
      }
    });
  }

  void activate_backward(std::size_t rows, std::size_t width, const bf16* gate_up,
                         const bf16* of_out, bf16* of_gate_up) override {
    enqueue([=] {
      for (std::size_t at = 0; at < rows * width; ++at) {
        const std::size_t gate = at / width * 2 * width + at % width;
        const swiglu_gradients made = swiglu_backward(
            to_float(gate_up[gate]), to_float(gate_up[gate + width]), to_float(of_out[at]));
        of_gate_up[gate] = to_bf16(made.gate);
        of_gate_up[gate + width] = to_bf16(made.up);
      }
    });
  }

 private:
  /// to[rows][n] = from[rows][k] weights[k][n], or adds that to it.
  static void multiply(row_group group, const std::vector<float>& weights, std::size_t k,
                       std::size_t n, const bf16* from, bf16* to, bool add) {
    std::vector<float> sum(n);
    for (std::size_t r = group.begin; r < group.begin + group.rows; ++r) {
      for (std::size_t i = 0; i < n; ++i) sum[i] = add ? to_float(to[r * n + i]) : 0;
      for (std::size_t i = 0; i < k; ++i) {
        add_scaled(sum.data(), to_float(from[r * k + i]), &weights[i * n], n);
      }
      std::transform(sum.begin(), sum.end(), to + r * n, to_bf16);
    }
  }

  /// Calls `work(group, elements of a group's weights, its index)` for each.
  template <class Work>
  void for_groups(std::span<const row_group> groups, Work&& work, const grouped_linear& layer) {
    enqueue([all = std::vector(groups.begin(), groups.end()), work = std::forward<Work>(work),
             size = layer.inputs * layer.outputs] {
      for (std::size_t g = 0; g < all.size(); ++g) work(all[g], size, g);
    });
  }

  template <class Work>
  void enqueue(Work&& work) {
    memory_.on->launch(memory_.stream, std::forward<Work>(work));
  }

  device_memory& memory_;
};

}  // namespace

std::unique_ptr<layer_math> make_cpu_math(device_memory& memory) {
  return std::make_unique<cpu_math>(memory);
}

}  // namespace moe
