// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/rail.hpp"

#include "comm/collective_change.hpp"
#include "lib/memory/scoped_stream.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <utility>

namespace evmm::ep {

token_record rail_options::record(bool as_gradients) const {
  const bool fp8 = rows == payload::fp8 && !as_gradients;
  return {.row_bytes = static_cast<std::uint32_t>(hidden * (fp8 ? 1 : 2)),
          .scale_count = fp8 ? static_cast<int>(hidden / 128) : 0,
          .top_k = top_k};
}

void check_nodes(const char* who, const bootstrap& ranks) {
  const std::vector<int>& nodes = ranks.nodes();
  const auto ranks_beside = [&](std::size_t r) {
    return std::count(nodes.begin(), nodes.end(), nodes[r]);
  };
  for (std::size_t r = 1; r < nodes.size(); ++r) {
    if (ranks_beside(r) == ranks_beside(0)) continue;
    throw unsupported(fmt::format("{}: the node of rank 0 has {} ranks, that of rank {} has {}",
                                  who, ranks_beside(0), r, ranks_beside(r)),
                      "start as many ranks on every node");
  }
}

rail_buffers::rail_buffers(heap_source& from, const rail_options& options, std::size_t nodes,
                           bool for_gradients) {
  const std::size_t rows = nodes * options.max_tokens;
  const std::size_t choices = rows * static_cast<std::size_t>(options.top_k);
  const token_record token = options.record();
  const token_record gradient = options.record(for_gradients);
  const std::size_t bytes = rows * std::max(token.bytes(), gradient.bytes());
  outgoing = make_rail_buffer<std::byte>(from, bytes);
  incoming = make_rail_buffer<std::byte>(from, bytes);
  x = make_rail_buffer<std::byte>(from, rows * std::max(token.row_bytes, gradient.row_bytes));
  if (token.scale_count > 0) {
    scales = make_rail_buffer<float>(from, rows * static_cast<std::size_t>(token.scale_count));
  }
  ids = make_rail_buffer<std::int64_t>(from, choices);
  weights = make_rail_buffer<float>(from, choices);
  sums = make_rail_buffer<std::uint16_t>(from, rows * options.hidden);
  returns = make_rail_buffer<std::uint16_t>(from, rows * options.hidden);
}

rail::rail(symmetric_heap& heap, symmetric_channel& channel, const rail_options& options,
           symmetric_buffer<std::int32_t> rank_map)
    : heap_(heap), channel_(channel), options_(options), rank_map_(std::move(rank_map)) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  const std::vector<int>& nodes = ranks.nodes();
  peers_.resize(static_cast<std::size_t>(ranks.node_count()));
  std::vector<std::int32_t> ranks_so_far(peers_.size());
  std::vector<std::int32_t> arrays(nodes.begin(), nodes.end());
  for (std::size_t r = 0; r < nodes.size(); ++r) {
    const auto node = static_cast<std::size_t>(nodes[r]);
    const std::int32_t index = ranks_so_far[node]++;
    arrays.push_back(index);
    if (index == ranks.node_rank()) peers_[node] = rank_id{static_cast<int>(r)};
  }
  map_ = {.node = ranks.node(),
          .nodes = ranks.node_count(),
          .experts_a_rank = options.experts / ranks.size(),
          .experts = options.experts,
          .node_of = rank_map_.local(),
          .index_in = rank_map_.local() + nodes.size()};
  agree_on(ranks, fmt::format("{}: rail", options.who), [&] {
    heap_source(heap).settle();
    const scoped_stream stream(on(), region.device());
    on().copy(reinterpret_cast<address>(rank_map_.local()),
              reinterpret_cast<address>(arrays.data()), rank_map_.bytes(), stream.get());
    on().synchronize(stream.get());
    steps_ = on().info().kind == driver_kind::cuda ? make_cuda_rail_steps(region.device())
                                                   : make_host_rail_steps(on());
  });
}

void rail::check_call(native_stream stream) const {
  channel_.check();
  if (on().capture(stream).status == capture_status::none) return;
  throw unsupported(fmt::format("{}: what crosses nodes cannot be captured", options_.who),
                    "call it between launches of the graph");
}

token_arrays rail::prepare(const token_arrays& given, const token_batch& own,
                           native_stream stream) const {
  token_arrays from = given;
  if (options_.quantize) {
    steps_->quantize(given, static_cast<int>(options_.hidden), own, stream);
    from.x = own.x;
    from.scales = own.scales;
  }
  return from;
}

void rail::cross(const std::vector<rail_block>& by_node, std::size_t to, std::size_t stride,
                 native_stream stream) const {
  const auto size = static_cast<std::size_t>(heap_.region().ranks().size());
  std::vector<outgoing_block> out(size);
  std::vector<incoming_block> in(size);
  for (std::size_t node = 0; node < nodes(); ++node) {
    if (node == here()) continue;
    const auto r = static_cast<std::size_t>(peers_[node].value);
    const rail_block& block = by_node[node];
    out[r] = {block.from, to + here() * stride, block.sent};
    in[r] = {to + node * stride, block.came};
  }
  channel_.all_to_all_v(out, in, stream);
}

}  // namespace evmm::ep
