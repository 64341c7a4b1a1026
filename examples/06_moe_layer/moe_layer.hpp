// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "data.hpp"
#include "layer_math.hpp"

#include <evmm/ep/exchange.hpp>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

namespace moe {

struct layer_options {
  layer_shape shape;
  /// Of a balanced load, what lies on the device at first. The rest, up to the worst case, lies in
  /// host memory; adapt() follows what was received.
  double device_share = 1;
};

/// What a step needed of the exchange's buffers, on this rank.
struct layer_load {
  std::size_t rows = 0;         ///< tokens that came
  std::size_t expert_rows = 0;  ///< their choices of this rank's experts
  std::size_t on_host = 0;      ///< of the latter, those in HOST_NUMA memory
};

/// One rank's part of a mixture-of-experts layer whose experts are spread over the ranks:
///
///   router -> dispatch -> gate and up projections -> SwiGLU -> down projection -> combine
///
/// and all gradients. Everything is enqueued on the stream of the device_memory; the CPU waits once
/// in forward(), for the counts. Calls are collective.
class moe_layer {
 public:
  /// `memory` and `math`, which computes on it, must outlive the layer; so must the heap.
  moe_layer(evmm::symmetric_heap& heap, device_memory& memory, layer_math& math,
            const layer_options& options);

  /// Uploads this rank's parameters.
  void set_parameters(const data_set& from);
  void set_router_bias(const std::vector<float>& bias) { bias_.assign(bias); }

  /// y = layer(x), both [tokens][hidden]. x must stay until backward().
  void forward(const bf16* x, bf16* y);
  /// of_x from of_y, and the gradients below; of the last forward().
  void backward(const bf16* of_y, bf16* of_x);
  /// Lets the device part of the buffers follow the load. Waits for the stream.
  void adapt() { exchange_.adapt(); }
  /// Throws when a peer was waited for in vain or a choice was not an expert.
  void check() { exchange_.check(); }

  layer_load load() const;
  std::size_t device_expert_rows() const { return exchange_.options().device_expert_rows; }
  std::size_t first_expert() const { return first_expert_; }
  std::size_t local_experts() const { return local_experts_; }
  /// [tokens][top_k]
  const device_array<std::int64_t>& ids() const { return ids_; }
  const device_array<float>& weights() const { return weights_; }
  const device_array<float>& weight_gradients() const { return of_weights_; }
  /// [experts][hidden]: from this rank's tokens; data-parallel training would sum them over ranks.
  const device_array<float>& router_gradient() const { return of_router_; }
  /// Of this rank's experts, from the tokens of all ranks.
  const device_array<float>& gate_up_gradient() const { return of_gate_up_weights_; }
  const device_array<float>& down_gradient() const { return of_down_weights_; }

 private:
  routing_call routing() const;
  evmm::ep::tokens tokens(const bf16* rows) const;
  void see_groups();
  grouped_linear gate_up_layer() const;
  grouped_linear down_layer() const;

  evmm::symmetric_heap& heap_;
  device_memory& memory_;
  layer_math& math_;
  layer_shape shape_;
  evmm::ep::exchange exchange_;
  evmm::ep::plan plan_;
  std::size_t local_experts_ = 0, first_expert_ = 0;

  // Parameters, and their gradients.
  device_array<bf16> router_, gate_up_weights_, down_weights_;
  device_array<float> bias_;
  device_array<float> of_router_, of_gate_up_weights_, of_down_weights_;

  // What forward() keeps for backward().
  const bf16* x_ = nullptr;
  device_array<float> logits_, weights_, of_weights_;
  device_array<std::int64_t> ids_;
  evmm::ep::received received_;
  evmm::ep::row_counts counts_;
  std::vector<row_group> groups_;
  device_array<bf16> gate_up_, activated_, outputs_;
};

}  // namespace moe
