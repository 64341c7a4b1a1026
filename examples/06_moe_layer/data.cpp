// SPDX-License-Identifier: Apache-2.0
#include "data.hpp"

#include <cmath>

namespace moe {

namespace {

enum class drawn : std::uint64_t { tokens, output_gradients, router, gate_up, down };

std::uint64_t mixed(std::uint64_t value) {
  value += 0x9e3779b97f4a7c15;
  value = (value ^ (value >> 30)) * 0xbf58476d1ce4e5b9;
  value = (value ^ (value >> 27)) * 0x94d049bb133111eb;
  return value ^ (value >> 31);
}

std::uint64_t seed_of(std::uint64_t seed, drawn what, std::uint64_t index) {
  return mixed(mixed(seed ^ mixed(static_cast<std::uint64_t>(what))) + index);
}

std::uint64_t index_of(int rank, int step) {
  return static_cast<std::uint64_t>(step) << 32 | static_cast<std::uint64_t>(rank);
}

/// Uniform values around 0 of this variance.
std::vector<bf16> draw(std::uint64_t seed, std::size_t count, double variance) {
  const double range = std::sqrt(3 * variance);
  std::vector<bf16> values(count);
  for (std::size_t i = 0; i < count; ++i) {
    const double unit = static_cast<double>(mixed(seed + i) >> 11) * 0x1p-53;
    values[i] = to_bf16(static_cast<float>((2 * unit - 1) * range));
  }
  return values;
}

/// Of weights, so that outputs are as large as inputs.
double variance_for(std::size_t inputs) {
  return 1 / static_cast<double>(inputs);
}

}  // namespace

std::vector<bf16> data_set::tokens(int rank, int step) const {
  return draw(seed_of(seed_, drawn::tokens, index_of(rank, step)), shape_.tokens * shape_.hidden,
              1);
}

std::vector<bf16> data_set::output_gradients(int rank, int step) const {
  return draw(seed_of(seed_, drawn::output_gradients, index_of(rank, step)),
              shape_.tokens * shape_.hidden, 1);
}

std::vector<bf16> data_set::router() const {
  return draw(seed_of(seed_, drawn::router, 0), shape_.experts * shape_.hidden,
              variance_for(shape_.hidden));
}

std::vector<float> data_set::router_bias(int step) const {
  std::vector<float> bias(shape_.experts);
  for (std::size_t e = 0; step > 0 && e < bias.size(); ++e) {
    bias[e] = static_cast<float>(-skew_ * std::log(static_cast<double>(e + 1)));
  }
  return bias;
}

std::vector<bf16> data_set::gate_up(std::size_t expert) const {
  return draw(seed_of(seed_, drawn::gate_up, expert), shape_.gate_up_size(),
              variance_for(shape_.hidden));
}

std::vector<bf16> data_set::down(std::size_t expert) const {
  return draw(seed_of(seed_, drawn::down, expert), shape_.down_size(),
              variance_for(shape_.intermediate));
}

}  // namespace moe
