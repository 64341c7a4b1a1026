// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/low_latency_state.hpp"

#include "comm/collective_change.hpp"
#include "comm/ep/common_options.hpp"
#include "lib/memory/scoped_stream.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <optional>
#include <utility>
#include <vector>

// How a low-latency exchange comes to be.

namespace evmm::ep {

namespace {

constexpr const char* k_name = "ep::low_latency_exchange";
constexpr std::size_t k_most_batch = 1024;  ///< tokens that a rank sends within its node

void check_options(const low_latency_options& given, const job_shape& job) {
  check_common_options(k_name, given, job);
  const auto nodes = static_cast<std::size_t>(job.nodes);
  if (given.max_tokens > 0 && given.max_tokens <= k_most_batch / nodes) return;
  if (nodes == 1) {
    refuse_low_latency(fmt::format("max_tokens is {}", given.max_tokens),
                       "give 1 to 1,024, or use ep::exchange for more");
  }
  refuse_low_latency(
      fmt::format("max_tokens is {}, {} over {} nodes: at most {} of all nodes fit",
                  given.max_tokens, given.max_tokens * nodes, nodes, k_most_batch),
      fmt::format("give 1 to {}, or use ep::exchange for more", k_most_batch / nodes));
}

enum : std::size_t { k_lost, k_wrong, k_most_rows, k_host_words };

}  // namespace

void refuse_low_latency(const std::string& what, const std::string& help) {
  throw invalid_argument(std::string(k_name) + ": " + what, help);
}

low_latency_buffers::low_latency_buffers(heap_source& from, const low_latency_options& options,
                                         const ep_shape& given, int batch)
    : shape(given) {
  const auto make = [&]<class T>(symmetric_buffer<T>& to, std::size_t count) {
    to = from.make<T>(count, 4096);
  };
  const auto tokens_each = static_cast<std::size_t>(batch);
  const auto ranks = static_cast<std::size_t>(shape.ranks);
  const auto scale_count = static_cast<std::size_t>(shape.scale_count);
  const std::size_t places = ranks * tokens_each;
  const std::size_t choices = places * static_cast<std::size_t>(options.top_k);
  make(flags, flag_kinds * ranks);
  make(masks, tokens_each);
  make(x, places * shape.row_bytes);
  if (scale_count > 0) make(scales, places * scale_count);
  make(experts, choices);
  make(weights, choices);
  make(tokens, places);
  make(plan_places, places);
  make(plan_first, ranks);
  make(told_rows, ranks);
  make(source_rows, ranks);
  make(y, places * options.hidden);
  if (options.arranged != layout::by_expert) return;
  const auto local_experts = static_cast<std::size_t>(shape.local_experts);
  const std::size_t rows = local_experts * places;
  make(expert_x, rows * shape.row_bytes);
  if (scale_count > 0) make(expert_scales, rows * scale_count);
  make(expert_begin, local_experts + 1);
  make(expert_rows, choices);
  make(row_experts, rows);
  make(row_places, rows);
  make(expert_tokens, local_experts);
  make(expert_y, rows * options.hidden);
}

void low_latency_buffers::wire(int batch, std::uint64_t* dead) {
  shape.flags = flags.offset();
  shape.x = x.offset();
  shape.scales = scales ? scales.offset() : 0;
  shape.experts = experts.offset();
  shape.weights = weights.offset();
  shape.tokens = tokens.offset();
  shape.y = y.offset();
  slot = {
      .told_rows = told_rows.offset(),
      .source_rows = source_rows.local(),
      .max_tokens = batch,
      .plan = {.masks = masks.local(), .places = plan_places.local(), .first = plan_first.local()},
      .dead = dead};
  layout.rows = {.filled = source_rows.local(), .blocks = shape.ranks, .stride = batch};
  if (!expert_x) return;
  layout.alignment = 1;
  layout.stride = shape.ranks * batch;
  layout.expert_tokens = expert_tokens.local();
  layout.begin = expert_begin.local();
  layout.expert_rows = expert_rows.local();
  layout.row_experts = row_experts.local();
  layout.row_places = row_places.local();
  layout.x = reinterpret_cast<char*>(expert_x.local());
  layout.scales = expert_scales ? expert_scales.local() : nullptr;
  layout.y = reinterpret_cast<char*>(expert_y.local());
}

low_latency_memory::low_latency_memory(heap_source& from, const low_latency_options& options,
                                       const ep_shape& shape, const job_shape& job)
    // Within a node, what came from others is sent on like a rank's own.
    : batch(static_cast<int>(options.max_tokens) * job.nodes),
      across(job.nodes > 1 ? std::optional<fixed_rail_buffers>(std::in_place, from, options, job)
                           : std::nullopt),
      dead(from.make<std::uint64_t>(1)),
      sets{{from, options, shape, batch}, {from, options, shape, batch}} {}

low_latency_exchange::state::state(symmetric_heap& given, symmetric_channel* channel,
                                   const low_latency_options& wanted)
    : heap(given), options(wanted) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  const job_shape job = job_of(heap);
  agree_on(ranks, "ep::low_latency_exchange: options", [&] {
    check_options(options, job);
    check_nodes(k_name, ranks);
    check_channel(k_name, heap, channel,
                  "give the channel that carries what crosses nodes; or make one for the ranks of "
                  "each node");
  });
  check_alike(k_name, ranks, options, [](const alike&, const auto&, const auto&) {});
  ep_shape shape = common_shape(options, region.view(), ranks.size());
  if (job.nodes > 1) shape.quantize = false;  // rows are before they cross
  heap_source from(heap);
  low_latency_memory& own = memory.emplace(from, options, shape, job);
  for (low_latency_buffers& set : own.sets) set.wire(own.batch, own.dead.local());
  if (job.nodes > 1) {
    across = std::make_unique<fixed_rail>(heap, *channel, options, std::move(*own.across));
  }
  agree_on(ranks, "ep::low_latency_exchange: begin", [&] {
    from.settle();
    host.emplace(on(), k_host_words * sizeof(std::uint64_t));
    const auto word = [&](std::size_t index) {
      return host->at<std::uint64_t>(index * sizeof(std::uint64_t));
    };
    totals = {.lost_on_host = word(k_lost), .wrong_on_host = word(k_wrong)};
    // This rank's rows begin at the same place at every peer. (Outlives the stream that reads it.)
    const std::vector<std::int32_t> first(static_cast<std::size_t>(shape.ranks),
                                          shape.rank * own.batch);
    const scoped_stream stream(on(), region.device());
    const auto clear = [&](const auto& words) {
      on().fill(reinterpret_cast<address>(words.local()), std::byte{0}, words.bytes(),
                stream.get());
    };
    clear(own.dead);
    for (low_latency_buffers& set : own.sets) {
      set.layout.most_rows_on_host = word(k_most_rows);
      clear(set.flags);
      on().copy(reinterpret_cast<address>(set.plan_first.local()),
                reinterpret_cast<address>(first.data()), set.plan_first.bytes(), stream.get());
    }
    on().synchronize(stream.get());
    const bool cuda = on().info().kind == driver_kind::cuda;
    steps = cuda ? make_cuda_low_latency_steps(region.device(), options.sms)
                 : make_host_low_latency_steps(on());
    local_steps =
        cuda ? make_cuda_steps(region.device(), options.sms, 0, shape.ranks * shape.local_experts)
             : make_host_steps(on());
  });
}

heap_footprint footprint(const low_latency_options& options, const job_shape& job) {
  check_job(job);
  check_options(options, job);
  heap_source counted(job);
  const low_latency_memory all(counted, options, common_shape(options, view_of(job), job.ranks),
                               job);
  return counted.taken();
}

}  // namespace evmm::ep
