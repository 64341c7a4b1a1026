// SPDX-License-Identifier: Apache-2.0
#pragma once

// The numbers of the layer, for kernels and host functions alike.

#include <evmm/device/symmetric_view.cuh>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace moe {

/// A bfloat16: the upper half of a float.
struct bf16 {
  std::uint16_t bits = 0;
};

EVMM_HOST_DEVICE float to_float(bf16 value) {
  const std::uint32_t bits = static_cast<std::uint32_t>(value.bits) << 16;
  float wide;
  memcpy(&wide, &bits, sizeof wide);
  return wide;
}

/// Rounds to nearest, ties to even; a NaN stays one.
EVMM_HOST_DEVICE bf16 to_bf16(float value) {
  std::uint32_t bits;
  memcpy(&bits, &value, sizeof bits);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

/// What an expert does between its two projections: silu(gate) x up.
EVMM_HOST_DEVICE float swiglu(float gate, float up) {
  return gate / (1 + expf(-gate)) * up;
}

struct swiglu_gradients {
  float gate, up;
};
EVMM_HOST_DEVICE swiglu_gradients swiglu_backward(float gate, float up, float of_output) {
  const float sigmoid = 1 / (1 + expf(-gate));
  return {of_output * up * sigmoid * (1 + gate * (1 - sigmoid)), of_output * gate * sigmoid};
}

}  // namespace moe
