// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "moe_layer.hpp"
#include "reference.hpp"

#include <evmm/comm/bootstrap.hpp>

#include <array>
#include <cstddef>
#include <vector>

namespace moe {

// What is compared, and how far it may be from the reference.
//
// An error is measured against rms + |value|, where rms, the root of the mean square, is that of
// the token's row, of the router's row or of the expert's matrix (of all, for routing weights'
// gradients): a sum of many products of both signs is as exact as its terms, whatever it comes to.
//
// BF16 has 8 significant bits: a rounding is wrong by at most 2^-8 of the value, and by 2^-9 as a
// root of the mean square. A value is rounded some six times from input to output: gate, up, their
// product, the expert's output, the sum of a rank's experts, the sum of the ranks; and as often on
// the way back. Sums are taken in FP32, which adds nothing to speak of. Independent errors add up
// as squares: sqrt(12) x 2^-9 = 2^-7.2 at the end. Of millions of values the worst is five to six
// times as far off: 2^-4.8. 2^-4 is tolerated. A row that is lost, doubled or given to another
// expert is wrong by its routing weight, several times that for all but a few; for those the
// gradient of the weight tells, which is wrong by all of itself.
//
// Logits and routing weights are FP32 on both sides.
enum quantity : std::size_t {
  routing_weight,
  output,
  of_token,
  of_routing_weight,
  of_router,
  of_gate_up,
  of_down,
  quantities
};
struct tolerated {
  const char* name;
  double error;
};
constexpr double k_bf16 = 0x1p-4;
constexpr std::array<tolerated, quantities> k_tolerated = {{
    {"routing weights", 1e-4},
    {"output", k_bf16},
    {"gradient of tokens", k_bf16},
    {"gradient of routing weights", k_bf16},
    {"gradient of the router", k_bf16},
    {"gradient of gate and up projections", k_bf16},
    {"gradient of down projections", k_bf16},
}};

/// Largest errors so far; infinite where a value is no number.
using errors = std::array<double, quantities>;

/// Compares the router's choices with what the reference's logits allow.
double routing_error(const layer_shape& shape, const std::vector<double>& logits,
                     const routed_tokens& mine);

/// Compares all else. `all` are the tokens of all ranks, `rank` is this one.
void compare(const moe_layer& layer, const layer_shape& shape, const dense_reference& reference,
             const std::vector<routed_tokens>& all, int rank, const std::vector<bf16>& y,
             const std::vector<bf16>& of_x, errors& found);

}  // namespace moe
