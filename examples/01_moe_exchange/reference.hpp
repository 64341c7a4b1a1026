// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "arithmetic.hpp"
#include "plan.hpp"
#include "routing.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace moe {

/// The tokens of a slice, as any rank can make them.
std::vector<bf16> make_tokens(std::uint64_t seed, const token_slice& slice, int hidden);

/// What a layer's output must be, bit for bit, for tokens x with these expert ids and weights:
/// y = sum over k of weight_k * expert_k(x). One token after the other, with no communication.
std::vector<bf16> reference_outputs(std::span<const bf16> tokens, std::span<const std::int32_t> ids,
                                    std::span<const float> weights, int top_k, int hidden);

/// Elements that differ in any bit.
std::size_t count_mismatches(std::span<const bf16> got, std::span<const bf16> expected);

}  // namespace moe
