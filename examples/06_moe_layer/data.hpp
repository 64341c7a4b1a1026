// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "numbers.hpp"

#include <cstddef>
#include <cstdint>
#include <vector>

namespace moe {

/// Sizes of the layer; the same on all ranks.
struct layer_shape {
  std::size_t tokens = 0;  ///< of a rank
  std::size_t hidden = 0;
  std::size_t intermediate = 0;  ///< between an expert's two projections
  std::size_t experts = 0;       ///< of all ranks together
  std::size_t top_k = 0;

  std::size_t gate_up_size() const { return 2 * intermediate * hidden; }
  std::size_t down_size() const { return hidden * intermediate; }
};

/// Parameters and tokens, drawn from a seed, so that every rank can make those of all others: the
/// reference needs no message. Matrices are [outputs][inputs], as torch.nn.Linear has them.
class data_set {
 public:
  data_set(const layer_shape& shape, std::uint64_t seed, double skew)
      : shape_(shape), seed_(seed), skew_(skew) {}

  std::vector<bf16> tokens(int rank, int step) const;
  /// Of the loss, by the layer's output.
  std::vector<bf16> output_gradients(int rank, int step) const;

  std::vector<bf16> router() const;  ///< [experts][hidden]
  /// Added to the logits: makes the first experts, those of rank 0, the busy ones. The first step
  /// is balanced.
  std::vector<float> router_bias(int step) const;
  std::vector<bf16> gate_up(std::size_t expert) const;  ///< gate's rows, then up's
  std::vector<bf16> down(std::size_t expert) const;

 private:
  layer_shape shape_;
  std::uint64_t seed_;
  double skew_;
};

}  // namespace moe
