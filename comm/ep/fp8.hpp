// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace evmm::ep {

constexpr std::size_t k_scale_elements = 128;  ///< of a row, that share a scale
constexpr float k_fp8_most = 448;              ///< the largest e4m3 number
/// Groups of smaller numbers are scaled as if this were their largest: a scale is never 0.
constexpr float k_least_amax = 1e-4f;

/// To the nearest e4m3 number, ties to even, saturating, as GPUs convert.
inline std::uint8_t to_fp8(float value) {
  const auto sign = static_cast<std::uint8_t>(std::signbit(value) ? 0x80 : 0);
  if (std::isnan(value)) return static_cast<std::uint8_t>(sign | 0x7f);
  const float size = std::min(std::fabs(value), k_fp8_most);
  if (size < std::ldexp(1.0f, -6)) {  // subnormal: steps of 2^-9, and the first normal is the 8th
    return static_cast<std::uint8_t>(sign | static_cast<int>(std::nearbyint(size * 512)));
  }
  const auto bits = std::bit_cast<std::uint32_t>(size);
  const std::uint32_t rounded = bits + 0x7ffff + ((bits >> 20) & 1);  // 3 bits of mantissa stay
  return static_cast<std::uint8_t>(sign | ((rounded >> 20) - ((127 - 7) << 3)));
}

inline float from_fp8(std::uint8_t bits) {
  const int exponent = bits >> 3 & 15;
  const auto mantissa = static_cast<float>(bits & 7);
  const float size =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(1 + mantissa / 8, exponent - 7);
  return (bits & 0x80) != 0 ? -size : size;
}

}  // namespace evmm::ep
