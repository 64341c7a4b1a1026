// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

/// Literals for sizes. Every size in evmm is a `std::size_t` count of bytes; `using namespace
/// evmm::units` gives `2_MiB` and its siblings, powers of two only.
namespace evmm::units {

consteval std::size_t operator""_B(unsigned long long n) {
  return n;
}
consteval std::size_t operator""_KiB(unsigned long long n) {
  return n << 10;
}
consteval std::size_t operator""_MiB(unsigned long long n) {
  return n << 20;
}
consteval std::size_t operator""_GiB(unsigned long long n) {
  return n << 30;
}
consteval std::size_t operator""_TiB(unsigned long long n) {
  return n << 40;
}

}  // namespace evmm::units
