// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <evmm/error.hpp>

namespace evmm::torch {

/// Whether PyTorch is loaded: then the hooks are called by it.
bool pytorch_is_here() noexcept;

/// Throws what PyTorch turns into torch.OutOfMemoryError. Returns when this PyTorch cannot be
/// given such an exception; then any other becomes a RuntimeError.
void raise_out_of_memory(const out_of_memory& failure);

}  // namespace evmm::torch
