// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/rail.hpp"

#include "comm/collective_change.hpp"
#include "comm/ep/scoped_stream.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace evmm::ep {

rail::rail(symmetric_heap& heap, symmetric_channel& channel, const rail_options& options)
    : heap_(heap), channel_(channel), options_(options) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  // Nodes are told apart by their first rank.
  struct place {
    int first, index, ranks;
  };
  const place mine{ranks.node_ranks().front().value, ranks.node_rank(),
                   static_cast<int>(ranks.node_ranks().size())};
  const auto all = ranks.all_gather_value(mine, fmt::format("{}: nodes", options.who));
  std::vector<int> firsts;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].index == 0) firsts.push_back(all[r].first);
    if (all[r].ranks == all[0].ranks) continue;
    throw unsupported(fmt::format("{}: the node of rank 0 has {} ranks, that of rank {} has {}",
                                  options.who, all[0].ranks, r, all[r].ranks),
                      "start as many ranks on every node");
  }
  std::sort(firsts.begin(), firsts.end());
  if (firsts.size() > static_cast<std::size_t>(batch_counts::most_nodes)) {
    throw unsupported(fmt::format("{}: {} nodes", options.who, firsts.size()),
                      fmt::format("at most {} can exchange", +batch_counts::most_nodes));
  }
  const auto node_of = [&](const place& one) {
    return static_cast<std::int32_t>(std::lower_bound(firsts.begin(), firsts.end(), one.first) -
                                     firsts.begin());
  };
  peers_.resize(firsts.size());
  std::vector<std::int32_t> arrays(2 * all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    arrays[r] = node_of(all[r]);
    arrays[all.size() + r] = all[r].index;
    if (all[r].index != mine.index) continue;
    peers_[static_cast<std::size_t>(arrays[r])] = rank_id{static_cast<int>(r)};
  }
  ranks_ = make<std::int32_t>(arrays.size());
  map_ = {.node = node_of(mine),
          .nodes = static_cast<int>(firsts.size()),
          .experts_a_rank = options.experts / ranks.size(),
          .experts = options.experts,
          .node_of = ranks_.local(),
          .index_in = ranks_.local() + all.size()};
  agree_on(ranks, fmt::format("{}: rail", options.who), [&] {
    const scoped_stream stream(on(), region.device());
    on().copy(reinterpret_cast<address>(ranks_.local()), reinterpret_cast<address>(arrays.data()),
              ranks_.bytes(), stream.get());
    on().synchronize(stream.get());
    steps_ = on().info().kind == driver_kind::cuda ? make_cuda_rail_steps(region.device())
                                                   : make_host_rail_steps(on());
  });
}

token_record rail::record(bool as_gradients) const {
  const bool fp8 = options_.rows == payload::fp8 && !as_gradients;
  return {.row_bytes = static_cast<std::uint32_t>(options_.hidden * (fp8 ? 1 : 2)),
          .scale_count = fp8 ? static_cast<int>(options_.hidden / 128) : 0,
          .top_k = options_.top_k};
}

rail_buffers rail::make_buffers(bool for_gradients) const {
  const std::size_t rows = nodes() * options_.max_tokens;
  const std::size_t choices = rows * static_cast<std::size_t>(options_.top_k);
  const token_record token = record();
  const token_record gradient = record(for_gradients);
  const std::size_t bytes = rows * std::max(token.bytes(), gradient.bytes());
  rail_buffers made;
  made.outgoing = make<std::byte>(bytes);
  made.incoming = make<std::byte>(bytes);
  made.x = make<std::byte>(rows * std::max(token.row_bytes, gradient.row_bytes));
  if (token.scale_count > 0) {
    made.scales = make<float>(rows * static_cast<std::size_t>(token.scale_count));
  }
  made.ids = make<std::int64_t>(choices);
  made.weights = make<float>(choices);
  made.sums = make<std::uint16_t>(rows * options_.hidden);
  made.returns = make<std::uint16_t>(rows * options_.hidden);
  return made;
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
