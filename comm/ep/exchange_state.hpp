// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/counted_rail.hpp"
#include "comm/ep/elastic_rows.hpp"
#include "comm/ep/ep_steps.hpp"
#include "comm/ep/pinned_words.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>

#include <optional>
#include <vector>

namespace evmm::ep {

/// What a plan takes.
struct plan_buffers {
  plan_buffers(heap_source& from, const ep_shape& shape, std::size_t max_tokens,
               std::size_t node_count);
  symmetric_buffer<std::uint64_t> masks;
  symmetric_buffer<std::int32_t> places, first, messages;
  rail_plan nodes;
  plan_arrays arrays() const {
    return {masks.local(), places.local(), first.local(), messages.local()};
  }
};

struct plan::state : plan_buffers {
  state(const void* exchange, heap_source& from, const ep_shape& shape, std::size_t max_tokens,
        std::size_t node_count)
      : plan_buffers(from, shape, max_tokens, node_count), maker(exchange) {}
  const void* maker;
  std::uint64_t call = 0;  ///< that sent by it last, of all that the exchange sent; 0: none
  std::size_t count = 0;   ///< of this rank's tokens
  int batch = 0;  ///< of what it sends on within the node: those, and what other nodes sent
};

/// What an exchange takes.
struct exchange_buffers {
  /// Of checked options.
  exchange_buffers(heap_source& from, const exchange_options& options, const ep_shape& shape,
                   const job_shape& job);
  std::size_t capacity, expert_capacity = 0;
  std::optional<counted_rail_buffers> across;
  symmetric_buffer<std::uint64_t> flags;
  symmetric_buffer<std::int32_t> messages, totals_words;
  symmetric_buffer<float> scales, weights, weight_gradients;
  symmetric_buffer<std::int32_t> experts, tokens;
  std::optional<elastic_rows> x, y;
  /// By expert only.
  symmetric_buffer<float> expert_scales;
  symmetric_buffer<std::int32_t> expert_begin, expert_rows, row_experts, row_places;
  std::optional<elastic_rows> expert_x, expert_y;
};

struct exchange::state {
  state(symmetric_heap& given, symmetric_channel* channel, const exchange_options& wanted);

  driver& on() const { return heap.region().on(); }
  bool by_expert() const { return options.arranged == layout::by_expert; }
  /// The tokens of a call, checked. Gradients are bf16, whatever the rows are.
  token_arrays arrays_of(const tokens& from, bool as_gradients) const;
  /// Of a call that follows a plan.
  token_arrays arrays_of_plan(const tokens& from, const plan& by, bool as_gradients) const;
  // Of the plans that calls are given:
  void check_made_here(const plan& given) const;
  void check_filled(const plan& by) const;
  /// For sums of what lies as the last call that sent left it.
  void check_last(const plan& by, native_stream stream) const;
  received output() const;
  /// The peers count on what comes behind the first of a call's steps: where one of `rest` throws,
  /// this rank is out of step.
  template <class Steps>
  void in_step(native_stream stream, const Steps& rest);
  /// Behind a plan, and finds where what comes lies by expert.
  void send(const ep_shape& as, const token_arrays& from, const plan& by, native_stream stream);
  /// What this rank sends within its node: `from`, and what crosses nodes.
  token_arrays batch_of(const token_arrays& from, const plan& by, bool again, bool as_gradients,
                        native_stream stream);
  /// Sums what is in the combine buffers, by expert within each rank first, times the weights; or,
  /// as `gradients`, without them.
  void sum(const plan& by, const combine_output& to, bool gradients, native_stream stream);
  /// The exchange whose receive buffers are the combine buffers.
  ep_shape gradient_shape() const;
  bool captured(native_stream stream) const;
  void check_in_step() const;
  /// Before a call enqueues anything: throws when the ranks are out of step, or what crosses nodes
  /// cannot be called. And for adapt() to wait for the stream: a captured call is none yet, since
  /// who replays it knows when and where.
  void begin_call(native_stream stream);
  /// Where the borders between the tiers are.
  void see_device_rows();

  symmetric_heap& heap;
  exchange_options options;
  std::optional<exchange_buffers> buffers;
  std::unique_ptr<counted_rail> across;  ///< where there are several nodes
  std::optional<pinned_words> host;
  ep_shape shape;
  ep_totals totals;
  expert_layout experts_at;
  std::unique_ptr<ep_steps> steps;
  std::uint64_t ticket = 0;  ///< of the last dispatch that was not captured
  std::uint64_t calls_that_sent = 0;
  bool out_of_step = false;            ///< rounds of counts and of rows are no longer as many
  std::vector<native_stream> streams;  ///< of the calls since adapt() waited for some
};

}  // namespace evmm::ep
