// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/exchange_state.hpp"

#include "comm/collective_change.hpp"
#include "comm/ep/common_options.hpp"
#include "comm/ep/scoped_stream.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace evmm::ep {

namespace {

constexpr const char* k_name = "ep::exchange";

void check_options(const exchange_options& given, const bootstrap& ranks) {
  check_common_options(k_name, given, ranks);
  const auto refuse = [](const std::string& what, const std::string& help) {
    throw invalid_argument(std::string(k_name) + ": " + what, help);
  };
  if (given.max_tokens == 0 || given.max_tokens > (std::size_t{1} << 20)) {
    refuse(fmt::format("max_tokens is {}", given.max_tokens), "give 1 to 1,048,576");
  }
  if (given.expert_alignment == 0 || given.expert_alignment > 4096) {
    refuse(fmt::format("expert_alignment is {}", given.expert_alignment), "give 1 to 4,096 rows");
  }
  if (given.local_sms < 0) {
    refuse(fmt::format("local_sms is {}", given.local_sms), "give 0 or more");
  }
  if (given.adapt_steps < 1 || given.adapt_steps > 16) {
    refuse(fmt::format("adapt_steps is {}", given.adapt_steps), "give 1 to 16");
  }
}

/// Words of the page-locked memory: what ep_totals points to, then the totals.
enum : std::size_t { k_ticket, k_lost, k_wrong, k_most_rows, k_most_expert_rows, k_totals };

}  // namespace

exchange::state::state(symmetric_heap& given, symmetric_channel* channel,
                       const exchange_options& wanted)
    : heap(given), options(wanted) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  const auto count = static_cast<int>(ranks.node_ranks().size());
  agree_on(ranks, "ep::exchange: options", [&] {
    check_options(options, ranks);
    if (channel == nullptr) {
      require_one_node(k_name, ranks, "give the channel that carries what crosses nodes");
    }
  });
  check_alike(k_name, ranks, options, [](const alike& same, const auto& a, const auto& b) {
    same("expert_alignment", a.expert_alignment, b.expert_alignment);
    same("device_rows", a.device_rows, b.device_rows);
    same("device_expert_rows", a.device_expert_rows, b.device_expert_rows);
    same("adapt_steps", a.adapt_steps, b.adapt_steps);
    same("local_sms", a.local_sms, b.local_sms);
  });
  shape = common_shape(options, region.view(), ranks.size());
  // Within a node, what came from others is sent on like a rank's own.
  auto batch = static_cast<std::size_t>(options.max_tokens);
  if (ranks.node_count() > 1) {
    across = std::make_unique<counted_rail>(heap, *channel, options);
    batch *= across->nodes();
    shape.quantize = false;  // rows are before they cross
  }
  max_batch = batch;
  const int local_experts = shape.local_experts;
  const auto top_k = static_cast<std::size_t>(options.top_k);
  capacity = static_cast<std::size_t>(count) * max_batch;
  if (options.device_rows == 0 || options.device_rows > capacity) options.device_rows = capacity;

  const symmetric_request on_device{.tiers = tier_policy::device_only};
  const auto words = static_cast<std::size_t>(count + local_experts);
  flags = {heap, static_cast<std::size_t>(flag_kinds * count), nullptr, on_device};
  messages = {heap, static_cast<std::size_t>(count) * words, nullptr, on_device};
  totals_words = {heap, 1 + words, nullptr, on_device};
  experts = {heap, capacity * top_k, nullptr, on_device};
  weights = {heap, capacity * top_k, nullptr, on_device};
  weight_gradients = {heap, capacity * top_k, nullptr, on_device};
  tokens_of = {heap, capacity, nullptr, on_device};
  const bool fp8 = options.rows == payload::fp8;
  const auto scale_count = static_cast<std::size_t>(shape.scale_count);
  if (fp8) scales = {heap, capacity * scale_count, nullptr, on_device};
  const std::size_t y_bytes = options.hidden * sizeof(std::uint16_t);
  x.emplace(heap, capacity, shape.row_bytes, options.device_rows, options.adapt_steps);
  y.emplace(heap, capacity, y_bytes, options.device_rows, options.adapt_steps);
  if (by_expert()) {
    expert_capacity =
        capacity * top_k + static_cast<std::size_t>(local_experts) * (options.expert_alignment - 1);
    if (options.device_expert_rows == 0 || options.device_expert_rows > expert_capacity) {
      options.device_expert_rows = expert_capacity;
    }
    expert_begin = {heap, static_cast<std::size_t>(local_experts + 1), nullptr, on_device};
    expert_rows = {heap, capacity * top_k, nullptr, on_device};
    row_experts = {heap, expert_capacity, nullptr, on_device};
    row_places = {heap, expert_capacity, nullptr, on_device};
    if (fp8) expert_scales = {heap, expert_capacity * scale_count, nullptr, on_device};
    expert_x.emplace(heap, expert_capacity, shape.row_bytes, options.device_expert_rows,
                     options.adapt_steps);
    expert_y.emplace(heap, expert_capacity, y_bytes, options.device_expert_rows,
                     options.adapt_steps);
  }

  see_device_rows();

  shape.flags = flags.offset();
  shape.counts = messages.offset();
  shape.x = x->offset();
  shape.scales = fp8 ? scales.offset() : 0;
  shape.experts = experts.offset();
  shape.weights = weights.offset();
  shape.tokens = tokens_of.offset();
  shape.y = y->offset();
  shape.weight_gradients = weight_gradients.offset();

  agree_on(ranks, "ep::exchange: begin", [&] {
    host.emplace(on(), k_totals * sizeof(std::uint64_t) + totals_words.bytes());
    const auto word = [&](std::size_t index) {
      return host->at<std::uint64_t>(index * sizeof(std::uint64_t));
    };
    totals = {.words = totals_words.local(),
              .on_host = reinterpret_cast<std::int32_t*>(word(k_totals)),
              .ticket_on_host = word(k_ticket),
              .lost_on_host = word(k_lost),
              .wrong_on_host = word(k_wrong),
              .most_rows_on_host = word(k_most_rows)};
    if (by_expert()) {
      experts_at = {
          .rows = {.filled = totals.words, .blocks = 1, .stride = static_cast<int>(capacity)},
          .alignment = static_cast<int>(options.expert_alignment),
          .stride = 0,
          .expert_tokens = totals.words + 1 + count,
          .begin = expert_begin.local(),
          .expert_rows = expert_rows.local(),
          .row_experts = row_experts.local(),
          .row_places = row_places.local(),
          .x = expert_x->local(),
          .scales = fp8 ? expert_scales.local() : nullptr,
          .y = expert_y->local(),
          .weight_gradients = weight_gradients.local(),
          .most_rows_on_host = word(k_most_expert_rows)};
    }
    const scoped_stream stream(on(), region.device());
    on().fill(reinterpret_cast<address>(flags.local()), std::byte{0}, flags.bytes(), stream.get());
    on().synchronize(stream.get());
    steps = on().info().kind == driver_kind::cuda
                ? make_cuda_steps(region.device(), options.sms, options.local_sms,
                                  count * local_experts)
                : make_host_steps(on());
  });
}

}  // namespace evmm::ep
