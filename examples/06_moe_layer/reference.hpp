// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data.hpp"

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace moe {

/// A rank's tokens and what the router gave them.
struct routed_tokens {
  std::vector<bf16> x, of_y;      ///< [tokens][hidden]
  std::vector<std::int64_t> ids;  ///< [tokens][top_k]
  std::vector<float> weights;
};

/// What the layer makes of a rank's tokens, in FP32.
struct token_results {
  std::vector<float> y, of_x;     ///< [tokens][hidden]; of_x is both the experts' and the router's
  std::vector<float> of_weights;  ///< [tokens][top_k]
  std::vector<float> of_router;   ///< [experts][hidden]
};

struct weight_results {
  std::vector<float> of_gate_up, of_down;
};

/// The same layer without an exchange, a batch or a BF16 between input and output: a loop over all
/// experts, each of which takes the rows that chose it. On the CPU, on `threads` threads.
class dense_reference {
 public:
  dense_reference(const layer_shape& shape, const data_set& data, unsigned threads)
      : shape_(shape), data_(data), threads_(threads) {}

  /// [tokens][experts], in double precision.
  std::vector<double> logits(const std::vector<bf16>& x, const std::vector<float>& bias) const;
  /// The router's part takes the gradients of the routing weights as they were computed, which are
  /// compared by themselves: what remains of the difference of two that are nearly equal is mostly
  /// their rounding.
  token_results of_tokens(const routed_tokens& mine,
                          const std::vector<float>& of_weights_computed) const;
  /// Of one expert, from the tokens of all ranks.
  weight_results of_expert(std::size_t expert, std::span<const routed_tokens> all) const;

 private:
  struct rows;
  rows rows_of(std::size_t expert, std::span<const routed_tokens> all) const;
  void run(rows& on, std::size_t expert) const;

  layer_shape shape_;
  const data_set& data_;
  unsigned threads_;
};

}  // namespace moe
