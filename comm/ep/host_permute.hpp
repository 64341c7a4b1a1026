// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/bf16.hpp"
#include "comm/ep/ep_shape.hpp"

// What permute_kernel.cuh does, as host functions.

namespace evmm::ep {

/// A word that only this thread writes becomes at least `value`.
inline void host_raise(std::uint64_t* word, std::uint64_t value) {
  if (value > read_signal(word)) signal(word, value);
}

void host_place(const ep_shape& shape, const expert_layout& to);
void host_permute(const ep_shape& shape, const expert_layout& to);
void host_unpermute(const ep_shape& shape, const expert_layout& from, bool weighted);
void host_permute_gradients(const ep_shape& shape, const expert_layout& to, const bf16* outputs);

}  // namespace evmm::ep
