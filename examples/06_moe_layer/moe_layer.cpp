// SPDX-License-Identifier: Apache-2.0
#include "moe_layer.hpp"

#include <algorithm>
#include <cmath>

namespace moe {

namespace {

// cuBLAS takes groups that begin anywhere. Kernels that give each block a tile of rows want no tile
// to hold rows of two experts, and ask for the height of their tiles here.
constexpr std::size_t k_group_alignment = 16;

evmm::ep::exchange_options exchange_for(const layer_options& options) {
  const layer_shape& shape = options.shape;
  const auto part = [&](std::size_t rows) {
    return std::max<std::size_t>(
        1, static_cast<std::size_t>(std::ceil(static_cast<double>(rows) * options.device_share)));
  };
  return {.experts = static_cast<int>(shape.experts),
          .top_k = static_cast<int>(shape.top_k),
          .hidden = shape.hidden,
          .arranged = evmm::ep::layout::by_expert,
          .expert_alignment = k_group_alignment,
          .max_tokens = shape.tokens,
          // In a balanced load each rank receives as many choices as it sends.
          .device_rows = part(shape.tokens),
          .device_expert_rows = part(shape.tokens * shape.top_k)};
}

}  // namespace

moe_layer::moe_layer(evmm::symmetric_heap& heap, device_memory& memory, layer_math& math,
                     const layer_options& options)
    : heap_(heap),
      memory_(memory),
      math_(math),
      shape_(options.shape),
      exchange_(heap, exchange_for(options)),
      plan_(exchange_.make_plan()) {
  const evmm::bootstrap& ranks = heap.region().ranks();
  local_experts_ = shape_.experts / static_cast<std::size_t>(ranks.size());
  first_expert_ = local_experts_ * static_cast<std::size_t>(ranks.rank().value);
  const std::size_t choices = shape_.tokens * shape_.top_k;
  ids_ = {memory, choices};
  weights_ = {memory, choices};
  of_weights_ = {memory, choices};
  logits_ = {memory, shape_.tokens * shape_.experts};
  bias_ = {memory, shape_.experts};
  of_router_ = {memory, shape_.experts * shape_.hidden};
  of_gate_up_weights_ = {memory, local_experts_ * shape_.gate_up_size()};
  of_down_weights_ = {memory, local_experts_ * shape_.down_size()};
}

void moe_layer::set_parameters(const data_set& from) {
  router_ = {memory_, from.router()};
  gate_up_weights_ = {memory_, local_experts_ * shape_.gate_up_size()};
  down_weights_ = {memory_, local_experts_ * shape_.down_size()};
  for (std::size_t e = 0; e < local_experts_; ++e) {
    const std::vector<bf16> gate_up = from.gate_up(first_expert_ + e);
    const std::vector<bf16> down = from.down(first_expert_ + e);
    memory_.copy(gate_up_weights_.data() + e * gate_up.size(), gate_up.data(),
                 gate_up.size() * sizeof(bf16));
    memory_.copy(down_weights_.data() + e * down.size(), down.data(), down.size() * sizeof(bf16));
  }
}

void moe_layer::forward(const bf16* x, bf16* y) {
  x_ = x;
  math_.route(routing());
  received_ = exchange_.dispatch(tokens(x), plan_, memory_.stream);
  see_groups();

  // As large as what came, not as the worst case.
  const std::size_t rows = counts_.expert_rows;
  gate_up_ = {memory_, rows * 2 * shape_.intermediate};
  activated_ = {memory_, rows * shape_.intermediate};
  outputs_ = {memory_, rows * shape_.hidden};
  auto* const made = static_cast<bf16*>(exchange_.combine_buffer());
  math_.forward(groups_, gate_up_layer(), static_cast<const bf16*>(received_.x), gate_up_.data());
  math_.activate(rows, shape_.intermediate, gate_up_.data(), activated_.data());
  math_.forward(groups_, down_layer(), activated_.data(), made);
  // Gradients come into the buffer later; those of the routing weights need what the experts made.
  memory_.enqueue_copy(outputs_.data(), made, rows * shape_.hidden * sizeof(bf16));
  exchange_.combine(plan_, y, nullptr, memory_.stream);
}

void moe_layer::backward(const bf16* of_y, bf16* of_x) {
  // From the sums to the experts' outputs, times the routing weights.
  const evmm::ep::received came =
      exchange_.combine_backward(tokens(of_y), plan_, outputs_.data(), memory_.stream);
  auto* const of_rows = static_cast<bf16*>(came.x);

  // Through the experts. Their inputs still lie where the dispatch put them: no other came since.
  const std::size_t rows = counts_.expert_rows;
  const device_array<bf16> of_activated(memory_, rows * shape_.intermediate);
  const device_array<bf16> of_gate_up(memory_, rows * 2 * shape_.intermediate);
  math_.backward_weights(groups_, down_layer(), of_rows, activated_.data(),
                         of_down_weights_.data());
  math_.backward_inputs(groups_, down_layer(), of_rows, of_activated.data(), false);
  math_.activate_backward(rows, shape_.intermediate, gate_up_.data(), of_activated.data(),
                          of_gate_up.data());
  math_.backward_weights(groups_, gate_up_layer(), of_gate_up.data(),
                         static_cast<const bf16*>(received_.x), of_gate_up_weights_.data());
  // In place of the gradients of the outputs, which are used up.
  math_.backward_inputs(groups_, gate_up_layer(), of_gate_up.data(), of_rows, false);

  // Back to the tokens, and the gradients of the routing weights with them.
  exchange_.dispatch_backward(plan_, of_x, ids_.data(), of_weights_.data(), memory_.stream);

  // Through the router, which saw the same tokens.
  const routing_call call = routing();
  const row_group all{0, shape_.tokens};
  const device_array<bf16> of_logits(memory_, shape_.tokens * shape_.experts);
  math_.route_backward(call, of_weights_.data(), of_logits.data());
  math_.backward_weights({&all, 1}, call.router, of_logits.data(), x_, of_router_.data());
  math_.backward_inputs({&all, 1}, call.router, of_logits.data(), of_x, true);

  // What forward() kept goes back to the allocator, in the order of the stream.
  gate_up_ = {};
  activated_ = {};
  outputs_ = {};
}

// The sizes of the groups come to the CPU: cuBLAS takes them there, and the arrays between the
// projections need no more memory than they say. That costs one wait in a step, for the counts
// alone; the rows may still be under way while the products are enqueued. A step that must not
// wait, as in a CUDA graph, would take kernels that read received::expert_begin on the device.
void moe_layer::see_groups() {
  counts_ = exchange_.counts();
  groups_.clear();
  for (std::size_t e = 0; e < counts_.by_expert.size(); ++e) {
    groups_.push_back({counts_.expert_begin[e], counts_.by_expert[e]});
  }
}

layer_load moe_layer::load() const {
  const evmm::symmetric_view view = heap_.region().view();
  const auto* const base = heap_.region().local();
  const std::size_t row_bytes = shape_.hidden * sizeof(bf16);
  const auto first = static_cast<std::size_t>(static_cast<const std::byte*>(received_.x) - base);
  layer_load seen{.rows = counts_.rows};
  for (const row_group& group : groups_) {
    seen.expert_rows += group.rows;
    for (std::size_t row = group.begin; row < group.begin + group.rows; ++row) {
      seen.on_host += view.on_host(view.rank, first + (row + 1) * row_bytes - 1);
    }
  }
  return seen;
}

routing_call moe_layer::routing() const {
  return {.tokens = shape_.tokens,
          .top_k = shape_.top_k,
          .x = x_,
          .router = {router_.data(), shape_.hidden, shape_.experts},
          .bias = bias_.data(),
          .logits = logits_.data(),
          .ids = ids_.data(),
          .weights = weights_.data()};
}

evmm::ep::tokens moe_layer::tokens(const bf16* rows) const {
  return {
      .x = rows, .topk_ids = ids_.data(), .topk_weights = weights_.data(), .count = shape_.tokens};
}

grouped_linear moe_layer::gate_up_layer() const {
  return {gate_up_weights_.data(), shape_.hidden, 2 * shape_.intermediate};
}

grouped_linear moe_layer::down_layer() const {
  return {down_weights_.data(), shape_.intermediate, shape_.hidden};
}

}  // namespace moe
