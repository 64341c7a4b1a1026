// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bf16.hpp"
#include "comm/ep/ep_shape.hpp"

#include <vector>

// What permute_kernel.cuh does, as host functions, and how rows are quantised.

namespace evmm::ep {

/// A row of bf16 to one of e4m3, and its scales.
void host_quantize(const bf16* row, std::vector<char>& made, std::vector<float>& scales);

/// A word that only this thread writes becomes at least `value`.
inline void host_raise(std::uint64_t* word, std::uint64_t value) {
  if (value > read_signal(word)) signal(word, value);
}

void host_place(const ep_shape& shape, const expert_layout& to);
void host_permute(const ep_shape& shape, const expert_layout& to);
void host_unpermute(const ep_shape& shape, const expert_layout& from, bool weighted);
void host_permute_gradients(const ep_shape& shape, const expert_layout& to, const bf16* outputs);

}  // namespace evmm::ep
