// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/low_latency_state.hpp"

#include "comm/collective_change.hpp"
#include "comm/ep/common_options.hpp"
#include "comm/ep/scoped_stream.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <vector>

// How a low-latency exchange comes to be.

namespace evmm::ep {

namespace {

constexpr const char* k_name = "ep::low_latency_exchange";
constexpr std::size_t k_most_batch = 1024;  ///< tokens that a rank sends within its node

void check_options(const low_latency_options& given, const bootstrap& ranks) {
  check_common_options(k_name, given, ranks);
  const auto nodes = static_cast<std::size_t>(ranks.node_count());
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

low_latency_exchange::state::state(symmetric_heap& given, symmetric_channel* channel,
                                   const low_latency_options& wanted)
    : heap(given), options(wanted) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  agree_on(ranks, "ep::low_latency_exchange: options", [&] {
    check_options(options, ranks);
    if (channel == nullptr) {
      require_one_node(k_name, ranks,
                       "give the channel that carries what crosses nodes; or make one for the "
                       "ranks of each node");
    }
  });
  check_alike(k_name, ranks, options, [](const alike&, const auto&, const auto&) {});
  // Within a node, what came from others is sent on like a rank's own.
  batch = static_cast<int>(options.max_tokens);
  if (ranks.node_count() > 1) {
    across = std::make_unique<fixed_rail>(heap, *channel, options);
    batch = across->batch_size();
  }
  dead = {heap, 1, nullptr, {.tiers = tier_policy::device_only}};
  for (low_latency_buffers& set : sets) take_buffers(set);
  agree_on(ranks, "ep::low_latency_exchange: begin", [&] {
    host.emplace(on(), k_host_words * sizeof(std::uint64_t));
    const auto word = [&](std::size_t index) {
      return host->at<std::uint64_t>(index * sizeof(std::uint64_t));
    };
    totals = {.lost_on_host = word(k_lost), .wrong_on_host = word(k_wrong)};
    const scoped_stream stream(on(), region.device());
    const auto clear = [&](const auto& words) {
      on().fill(reinterpret_cast<address>(words.local()), std::byte{0}, words.bytes(),
                stream.get());
    };
    clear(dead);
    // This rank's rows begin at the same place at every peer.
    const ep_shape& shape = sets[0].shape;
    const std::vector<std::int32_t> first(static_cast<std::size_t>(shape.ranks),
                                          shape.rank * batch);
    for (low_latency_buffers& set : sets) {
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

void low_latency_exchange::state::take_buffers(low_latency_buffers& set) {
  const symmetric_request on_device{.tiers = tier_policy::device_only, .alignment = 4096};
  ep_shape& shape = set.shape;
  shape = common_shape(options, heap.region().view(), heap.region().ranks().size());
  if (across) shape.quantize = false;  // rows are before they cross
  const auto tokens = static_cast<std::size_t>(batch);
  const auto all_ranks = static_cast<std::size_t>(shape.ranks);
  const auto top_k = static_cast<std::size_t>(options.top_k);
  const std::size_t places = all_ranks * tokens;
  const auto scale_count = static_cast<std::size_t>(shape.scale_count);
  set.flags = {heap, flag_kinds * all_ranks, nullptr, on_device};
  set.masks = {heap, tokens, nullptr, on_device};
  set.x = {heap, places * shape.row_bytes, nullptr, on_device};
  if (scale_count > 0) set.scales = {heap, places * scale_count, nullptr, on_device};
  set.experts = {heap, places * top_k, nullptr, on_device};
  set.weights = {heap, places * top_k, nullptr, on_device};
  set.tokens = {heap, places, nullptr, on_device};
  set.plan_places = {heap, tokens * all_ranks, nullptr, on_device};
  set.plan_first = {heap, all_ranks, nullptr, on_device};
  set.source_rows = {heap, all_ranks, nullptr, on_device};
  set.y = {heap, places * options.hidden, nullptr, on_device};
  shape.flags = set.flags.offset();
  shape.x = set.x.offset();
  shape.scales = set.scales ? set.scales.offset() : 0;
  shape.experts = set.experts.offset();
  shape.weights = set.weights.offset();
  shape.tokens = set.tokens.offset();
  shape.y = set.y.offset();
  set.slot = {.source_rows = set.source_rows.offset(),
              .max_tokens = batch,
              .plan = {.masks = set.masks.local(),
                       .places = set.plan_places.local(),
                       .first = set.plan_first.local()},
              .dead = dead.local()};
  set.layout.rows = {.filled = set.source_rows.local(), .blocks = shape.ranks, .stride = batch};
  if (!by_expert()) return;
  const auto local_experts = static_cast<std::size_t>(shape.local_experts);
  const std::size_t rows = local_experts * places;
  set.expert_x = {heap, rows * shape.row_bytes, nullptr, on_device};
  if (scale_count > 0) set.expert_scales = {heap, rows * scale_count, nullptr, on_device};
  set.expert_begin = {heap, local_experts + 1, nullptr, on_device};
  set.expert_rows = {heap, places * top_k, nullptr, on_device};
  set.row_experts = {heap, rows, nullptr, on_device};
  set.row_places = {heap, rows, nullptr, on_device};
  set.expert_tokens = {heap, local_experts, nullptr, on_device};
  set.expert_y = {heap, rows * options.hidden, nullptr, on_device};
  set.layout.alignment = 1;
  set.layout.stride = static_cast<int>(places);
  set.layout.expert_tokens = set.expert_tokens.local();
  set.layout.begin = set.expert_begin.local();
  set.layout.expert_rows = set.expert_rows.local();
  set.layout.row_experts = set.row_experts.local();
  set.layout.row_places = set.row_places.local();
  set.layout.x = reinterpret_cast<char*>(set.expert_x.local());
  set.layout.scales = set.expert_scales ? set.expert_scales.local() : nullptr;
  set.layout.y = reinterpret_cast<char*>(set.expert_y.local());
}

}  // namespace evmm::ep
