// SPDX-License-Identifier: Apache-2.0
#pragma once

// What the layer computes. Two implementations: cuBLAS and kernels on a GPU, and plain loops on the
// host driver. Everything else is one code path that does not know which it has.

#include "device_memory.hpp"
#include "numbers.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace moe {

/// Rows that one expert works on, as the exchange arranges them.
struct row_group {
  std::size_t begin = 0;
  std::size_t rows = 0;
};

/// Linear layers without bias, one for each group of rows: y = x w^T.
struct grouped_linear {
  const bf16* weights = nullptr;  ///< [groups][outputs][inputs]
  std::size_t inputs = 0;
  std::size_t outputs = 0;
};

/// A router's forward pass.
struct routing_call {
  std::size_t tokens = 0;
  std::size_t top_k = 0;
  const bf16* x = nullptr;  ///< [tokens][inputs]
  grouped_linear router;    ///< one group; its outputs are the experts
  const float* bias = nullptr;
  float* logits = nullptr;      ///< [tokens][experts], for its own use
  std::int64_t* ids = nullptr;  ///< [tokens][top_k]: the largest logits, descending
  float* weights = nullptr;     ///< [tokens][top_k]: softmax of all, renormalised to those chosen
};

/// Each member enqueues on the stream of the device_memory that it was made with, and returns.
/// Products are summed in FP32. Rows outside of the groups are neither read nor written, save by
/// the element-wise functions, which compute there what nobody reads.
class layer_math {
 public:
  virtual ~layer_math() = default;
  /// What computes, for people.
  virtual std::string name() const = 0;

  virtual void route(const routing_call& call) = 0;
  /// `of_logits` ([tokens][experts]) from the gradients of the weights: 0 for those not chosen.
  virtual void route_backward(const routing_call& call, const float* of_weights,
                              bf16* of_logits) = 0;

  virtual void forward(std::span<const row_group> groups, const grouped_linear& layer,
                       const bf16* x, bf16* y) = 0;
  /// of_x = of_y w, or of_x += of_y w.
  virtual void backward_inputs(std::span<const row_group> groups, const grouped_linear& layer,
                               const bf16* of_y, bf16* of_x, bool add) = 0;
  /// of_weights [groups][outputs][inputs] = of_y^T x; 0 for a group without rows.
  virtual void backward_weights(std::span<const row_group> groups, const grouped_linear& layer,
                                const bf16* of_y, const bf16* x, float* of_weights) = 0;

  /// gate_up is [rows][2 x width], gate before up; out is [rows][width].
  virtual void activate(std::size_t rows, std::size_t width, const bf16* gate_up, bf16* out) = 0;
  virtual void activate_backward(std::size_t rows, std::size_t width, const bf16* gate_up,
                                 const bf16* of_out, bf16* of_gate_up) = 0;
};

std::unique_ptr<layer_math> make_cpu_math(device_memory& memory);
/// Throws unsupported when built without CUDA or cuBLAS.
std::unique_ptr<layer_math> make_cuda_math(device_memory& memory);
/// The one that fits the driver.
std::unique_ptr<layer_math> make_math(device_memory& memory);

}  // namespace moe
