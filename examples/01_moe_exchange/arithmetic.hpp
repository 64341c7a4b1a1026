// SPDX-License-Identifier: Apache-2.0
#pragma once

// The numbers of the example. Kernels, host functions and the reference all use these functions, so
// that their results agree bit for bit: each product and each sum is rounded by itself (no fused
// multiply-add; the host side is compiled with -ffp-contract=off).

#include <evmm/device/symmetric_view.cuh>

#include <bit>
#include <cstdint>

namespace moe {

/// A bfloat16: the upper half of a float.
struct bf16 {
  std::uint16_t bits = 0;
  friend bool operator==(const bf16&, const bf16&) = default;
};

EVMM_HOST_DEVICE float to_float(bf16 value) {
  return std::bit_cast<float>(static_cast<std::uint32_t>(value.bits) << 16);
}

/// Rounds to nearest, ties to even; a NaN stays one.
EVMM_HOST_DEVICE bf16 to_bf16(float value) {
  const auto bits = std::bit_cast<std::uint32_t>(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) {
    return {static_cast<std::uint16_t>((bits >> 16) | 0x40u)};
  }
  return {static_cast<std::uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16)};
}

EVMM_HOST_DEVICE float multiply(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fmul_rn(a, b);
#else
  return a * b;
#endif
}

EVMM_HOST_DEVICE float add(float a, float b) {
#if defined(__CUDA_ARCH__)
  return __fadd_rn(a, b);
#else
  return a + b;
#endif
}

/// The stand-in expert: y = x * scale(e) + shift(e), different for each expert so that a row that
/// reached the wrong one is noticed.
struct stand_in_expert {
  float scale = 1;
  float shift = 0;

  EVMM_HOST_DEVICE static stand_in_expert of(int expert) {
    return {1.0f + static_cast<float>((expert * 37) % 127) / 128.0f,
            static_cast<float>((expert * 53) % 509) / 256.0f - 1.0f};
  }
  EVMM_HOST_DEVICE bf16 operator()(bf16 x) const {
    return to_bf16(add(multiply(to_float(x), scale), shift));
  }
};

/// One term of the weighted sum at the source, in the order of the token's choices.
EVMM_HOST_DEVICE float accumulate(float sum, float weight, bf16 y) {
  return add(sum, multiply(weight, to_float(y)));
}

/// Mixes 64 bits (the finaliser of splitmix64).
constexpr std::uint64_t mix(std::uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}

/// Element `column` of a token: any rank can make any token, with no communication. Signs and
/// mantissas are random, magnitudes from 2^-7 to 2.
inline bf16 token_value(std::uint64_t seed, std::uint64_t token, int column) {
  const std::uint64_t key = mix(seed + 0x9e3779b97f4a7c15u * (token + 1));
  const std::uint64_t hash = mix(key + 0x9e3779b97f4a7c15u * static_cast<std::uint64_t>(column));
  const auto sign_and_mantissa = static_cast<std::uint32_t>(hash) & 0x807fu;
  const auto exponent = 120u + (static_cast<std::uint32_t>(hash >> 20) & 7u);
  return {static_cast<std::uint16_t>(sign_and_mantissa | (exponent << 7))};
}

}  // namespace moe
