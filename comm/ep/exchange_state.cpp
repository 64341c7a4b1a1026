// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/exchange_state.hpp"

#include "comm/collective_change.hpp"
#include "comm/ep/common_options.hpp"
#include "lib/memory/scoped_stream.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <utility>

namespace evmm::ep {

namespace {

constexpr const char* k_name = "ep::exchange";

/// Rows of the worst case, by source and, with all padding, by expert.
std::size_t rows_of(const exchange_options& options, const job_shape& job) {
  return options.max_tokens * static_cast<std::size_t>(job.ranks);
}
std::size_t expert_rows_of(const exchange_options& options, const job_shape& job) {
  return rows_of(options, job) * static_cast<std::size_t>(options.top_k) +
         static_cast<std::size_t>(options.experts / job.ranks) * (options.expert_alignment - 1);
}

void check_options(const exchange_options& given, const job_shape& job) {
  check_common_options(k_name, given, job);
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
  if (expert_rows_of(given, job) > INT32_MAX) {
    refuse(fmt::format("up to {} choices come to a rank: max_tokens is {}, top_k {}, of {} ranks",
                       expert_rows_of(given, job), given.max_tokens, given.top_k, job.ranks),
           fmt::format("at most {} have an index each: lower max_tokens", INT32_MAX));
  }
  if (given.adapt_steps < 1 || given.adapt_steps > 16) {
    refuse(fmt::format("adapt_steps is {}", given.adapt_steps), "give 1 to 16");
  }
}

/// Buffers of rows that lie in both tiers.
std::size_t elastic_buffers(const exchange_options& options, const job_shape& job) {
  const auto two = [](std::size_t on_device, std::size_t rows) -> std::size_t {
    return on_device != 0 && on_device < rows ? 2 : 0;
  };
  const bool by_expert = options.arranged == layout::by_expert;
  return two(options.device_rows, rows_of(options, job)) +
         (by_expert ? two(options.device_expert_rows, expert_rows_of(options, job)) : 0);
}

/// Words of the page-locked memory: what ep_totals points to, then the totals.
enum : std::size_t { k_ticket, k_lost, k_wrong, k_most_rows, k_most_expert_rows, k_totals };

}  // namespace

plan_buffers::plan_buffers(heap_source& from, const ep_shape& shape, std::size_t max_tokens,
                           std::size_t node_count) {
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  // Within a node, what came from others is sent on like a rank's own.
  const std::size_t batch = max_tokens * node_count;
  masks = from.make<std::uint64_t>(batch);
  places = from.make<std::int32_t>(batch * ranks);
  first = from.make<std::int32_t>(ranks);
  messages = from.make<std::int32_t>(ranks * static_cast<std::size_t>(shape.count_words()));
  if (node_count > 1) nodes = rail_plan(from, max_tokens, node_count);
}

exchange_buffers::exchange_buffers(heap_source& from, const exchange_options& options,
                                   const ep_shape& shape, const job_shape& job)
    : capacity(rows_of(options, job)) {
  if (job.nodes > 1) across.emplace(from, options, job);
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  const auto words = static_cast<std::size_t>(shape.count_words());
  const auto scale_count = static_cast<std::size_t>(shape.scale_count);
  const std::size_t choices = capacity * static_cast<std::size_t>(options.top_k);
  flags = from.make<std::uint64_t>(flag_kinds * ranks);
  messages = from.make<std::int32_t>(ranks * words);
  totals_words = from.make<std::int32_t>(1 + words);
  experts = from.make<std::int32_t>(choices);
  weights = from.make<float>(choices);
  weight_gradients = from.make<float>(choices);
  tokens = from.make<std::int32_t>(capacity);
  if (scale_count > 0) scales = from.make<float>(capacity * scale_count);
  const auto make_rows = [&](std::optional<elastic_rows>& rows, std::size_t count,
                             std::size_t bytes, std::size_t on_device) {
    rows.emplace(from, count, bytes, on_device == 0 ? count : on_device, options.adapt_steps);
  };
  const std::size_t y_bytes = options.hidden * sizeof(std::uint16_t);
  make_rows(x, capacity, shape.row_bytes, options.device_rows);
  make_rows(y, capacity, y_bytes, options.device_rows);
  if (options.arranged != layout::by_expert) return;
  expert_capacity = expert_rows_of(options, job);
  expert_begin = from.make<std::int32_t>(static_cast<std::size_t>(shape.local_experts) + 1);
  expert_rows = from.make<std::int32_t>(choices);
  row_experts = from.make<std::int32_t>(expert_capacity);
  row_places = from.make<std::int32_t>(expert_capacity);
  if (scale_count > 0) expert_scales = from.make<float>(expert_capacity * scale_count);
  make_rows(expert_x, expert_capacity, shape.row_bytes, options.device_expert_rows);
  make_rows(expert_y, expert_capacity, y_bytes, options.device_expert_rows);
}

exchange::state::state(symmetric_heap& given, symmetric_channel* channel,
                       const exchange_options& wanted)
    : heap(given), options(wanted) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  const job_shape job = job_of(heap);
  agree_on(ranks, "ep::exchange: options", [&] {
    check_options(options, job);
    check_nodes(k_name, ranks);
    check_channel(k_name, heap, channel, "give the channel that carries what crosses nodes");
  });
  check_alike(k_name, ranks, options, [](const alike& same, const auto& a, const auto& b) {
    same("expert_alignment", a.expert_alignment, b.expert_alignment);
    same("device_rows", a.device_rows, b.device_rows);
    same("device_expert_rows", a.device_expert_rows, b.device_expert_rows);
    same("adapt_steps", a.adapt_steps, b.adapt_steps);
    same("local_sms", a.local_sms, b.local_sms);
  });
  shape = common_shape(options, region.view(), ranks.size());
  heap_source from(heap);
  const std::size_t elastic = elastic_buffers(options, job);
  take_with_segments(heap, elastic * 2 * static_cast<std::size_t>(options.adapt_steps),
                     [&] { buffers.emplace(from, options, shape, job); });
  exchange_buffers& own = *buffers;
  if (job.nodes > 1) {
    across = std::make_unique<counted_rail>(heap, *channel, options, std::move(*own.across));
    shape.quantize = false;  // rows are before they cross
  }
  see_device_rows();

  shape.flags = own.flags.offset();
  shape.counts = own.messages.offset();
  shape.x = own.x->offset();
  shape.scales = own.scales ? own.scales.offset() : 0;
  shape.experts = own.experts.offset();
  shape.weights = own.weights.offset();
  shape.tokens = own.tokens.offset();
  shape.y = own.y->offset();
  shape.weight_gradients = own.weight_gradients.offset();

  agree_on(ranks, "ep::exchange: begin", [&] {
    from.settle();
    host.emplace(on(), k_totals * sizeof(std::uint64_t) + own.totals_words.bytes());
    const auto word = [&](std::size_t index) {
      return host->at<std::uint64_t>(index * sizeof(std::uint64_t));
    };
    totals = {.words = own.totals_words.local(),
              .on_host = reinterpret_cast<std::int32_t*>(word(k_totals)),
              .ticket_on_host = word(k_ticket),
              .lost_on_host = word(k_lost),
              .wrong_on_host = word(k_wrong),
              .most_rows_on_host = word(k_most_rows)};
    if (by_expert()) {
      experts_at = {
          .rows = {.filled = totals.words, .blocks = 1, .stride = static_cast<int>(own.capacity)},
          .alignment = static_cast<int>(options.expert_alignment),
          .stride = 0,
          .capacity = static_cast<int>(own.expert_capacity),
          .expert_tokens = totals.words + 1 + shape.ranks,
          .begin = own.expert_begin.local(),
          .expert_rows = own.expert_rows.local(),
          .row_experts = own.row_experts.local(),
          .row_places = own.row_places.local(),
          .x = own.expert_x->local(),
          .scales = own.expert_scales ? own.expert_scales.local() : nullptr,
          .y = own.expert_y->local(),
          .weight_gradients = own.weight_gradients.local(),
          .most_rows_on_host = word(k_most_expert_rows)};
    }
    const scoped_stream stream(on(), region.device());
    const auto fill = [&](const auto& words, std::byte with) {
      on().fill(reinterpret_cast<address>(words.local()), with, words.bytes(), stream.get());
    };
    fill(own.flags, std::byte{0});
    // Until a rank has come it has sent nothing, and its rows choose nobody.
    fill(own.messages, std::byte{0});
    fill(own.experts, std::byte{0xff});
    on().synchronize(stream.get());
    steps = on().info().kind == driver_kind::cuda
                ? make_cuda_steps(region.device(), options.sms, options.local_sms,
                                  shape.ranks * shape.local_experts)
                : make_host_steps(on());
  });
}

heap_footprint footprint(const exchange_options& options, const job_shape& job) {
  check_job(job);
  check_options(options, job);
  heap_source counted(job);
  const exchange_buffers all(counted, options, common_shape(options, view_of(job), job.ranks), job);
  return counted.taken();
}

heap_footprint plan_footprint(const exchange_options& options, const job_shape& job) {
  check_job(job);
  check_options(options, job);
  heap_source counted(job);
  const plan_buffers all(counted, common_shape(options, view_of(job), job.ranks),
                         options.max_tokens, static_cast<std::size_t>(job.nodes));
  return counted.taken();
}

}  // namespace evmm::ep
