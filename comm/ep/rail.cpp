// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/rail.hpp"

#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>

namespace evmm::ep {

rail::rail(symmetric_heap& heap, symmetric_channel& channel, const exchange_options& options)
    : heap_(heap), channel_(channel), options_(options) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  driver& on = region.on();
  // Nodes are told apart by their first rank.
  struct place {
    int first, index, ranks;
  };
  const place mine{ranks.node_ranks().front().value, ranks.node_rank(),
                   static_cast<int>(ranks.node_ranks().size())};
  const auto all = ranks.all_gather_value(mine, "ep::exchange: nodes");
  std::vector<int> firsts;
  for (std::size_t r = 0; r < all.size(); ++r) {
    if (all[r].index == 0) firsts.push_back(all[r].first);
    if (all[r].ranks == all[0].ranks) continue;
    throw unsupported(fmt::format("ep::exchange: the node of rank 0 has {} ranks, that of rank {} "
                                  "has {}",
                                  all[0].ranks, r, all[r].ranks),
                      "start as many ranks on every node");
  }
  std::sort(firsts.begin(), firsts.end());
  if (firsts.size() > static_cast<std::size_t>(batch_counts::most_nodes)) {
    throw unsupported(fmt::format("ep::exchange: {} nodes", firsts.size()),
                      fmt::format("at most {} can exchange", +batch_counts::most_nodes));
  }
  const auto nodes = firsts.size();
  const auto node_of = [&](const place& one) {
    return static_cast<std::int32_t>(std::lower_bound(firsts.begin(), firsts.end(), one.first) -
                                     firsts.begin());
  };
  peers_.resize(nodes);
  std::vector<std::int32_t> arrays(2 * all.size());
  for (std::size_t r = 0; r < all.size(); ++r) {
    arrays[r] = node_of(all[r]);
    arrays[all.size() + r] = all[r].index;
    if (all[r].index != mine.index) continue;
    peers_[static_cast<std::size_t>(arrays[r])] = rank_id{static_cast<int>(r)};
  }

  const symmetric_request on_device{.tiers = tier_policy::device_only, .alignment = 4096};
  const std::size_t blocks = nodes * options.max_tokens;
  const auto top_k = static_cast<std::size_t>(options.top_k);
  const std::size_t record = std::max(record_of(false).bytes(), record_of(true).bytes());
  ranks_ = {heap, arrays.size(), nullptr, on_device};
  counts_out_ = {heap, nodes, nullptr, on_device};
  counts_in_ = {heap, nodes, nullptr, on_device};
  outgoing_ = {heap, blocks * record, nullptr, on_device};
  incoming_ = {heap, blocks * record, nullptr, on_device};
  x_ = {heap, blocks * options.hidden * sizeof(std::uint16_t), nullptr, on_device};
  if (options.rows == payload::fp8) {
    scales_ = {heap, blocks * (options.hidden / 128), nullptr, on_device};
  }
  ids_ = {heap, blocks * top_k, nullptr, on_device};
  weights_ = {heap, blocks * top_k, nullptr, on_device};
  weight_sums_ = {heap, blocks * top_k, nullptr, on_device};
  weight_returns_ = {heap, blocks * top_k, nullptr, on_device};
  sums_ = {heap, blocks * options.hidden, nullptr, on_device};
  returns_ = {heap, blocks * options.hidden, nullptr, on_device};
  map_ = {.node = node_of(mine),
          .nodes = static_cast<int>(nodes),
          .experts_a_rank = options.experts / ranks.size(),
          .experts = options.experts,
          .node_of = ranks_.local(),
          .index_in = ranks_.local() + all.size()};
  const native_stream stream = on.create_stream(region.device());
  on.copy(reinterpret_cast<address>(ranks_.local()), reinterpret_cast<address>(arrays.data()),
          ranks_.bytes(), stream);
  on.synchronize(stream);
  on.destroy_stream(stream);
  steps_ = on.info().kind == driver_kind::cuda ? make_cuda_rail_steps(region.device())
                                               : make_host_rail_steps(on);
}

token_record rail::record_of(bool as_gradients) const {
  const bool fp8 = options_.rows == payload::fp8 && !as_gradients;
  return {.row_bytes = static_cast<std::uint32_t>(options_.hidden * (fp8 ? 1 : 2)),
          .scale_count = fp8 ? static_cast<int>(options_.hidden / 128) : 0,
          .top_k = options_.top_k};
}

rail_plan rail::make_plan() const {
  const auto nodes = static_cast<std::size_t>(map_.nodes);
  return {
      .places = {heap_, options_.max_tokens * nodes, nullptr, {.tiers = tier_policy::device_only}},
      .sent = std::vector<std::size_t>(nodes),
      .came = std::vector<std::size_t>(nodes)};
}

void rail::exchange_counts(rail_plan& plan, native_stream stream) {
  const auto nodes = static_cast<std::size_t>(map_.nodes);
  const auto size = static_cast<std::size_t>(heap_.region().ranks().size());
  std::vector<outgoing_block> out(size);
  std::vector<incoming_block> in(size);
  for (std::size_t node = 0; node < nodes; ++node) {
    const auto r = static_cast<std::size_t>(peers_[node].value);
    const auto word = [](std::size_t of) { return of * sizeof(std::int64_t); };
    const auto here = static_cast<std::size_t>(map_.node);
    out[r] = {counts_out_.offset() + word(node), counts_in_.offset() + word(here),
              sizeof(std::int64_t)};
    in[r] = {counts_in_.offset() + word(node), sizeof(std::int64_t)};
  }
  channel_.all_to_all_v(out, in, stream);
  // A copy to pageable memory blocks inside the driver: not while the stream waits for messages.
  channel_.synchronize(stream);
  std::vector<std::int64_t> sent(nodes), came(nodes);
  driver& on = heap_.region().on();
  const auto read = [&](std::vector<std::int64_t>& to, const symmetric_buffer<std::int64_t>& from) {
    on.copy(reinterpret_cast<address>(to.data()), reinterpret_cast<address>(from.local()),
            from.bytes(), stream);
  };
  read(sent, counts_out_);
  read(came, counts_in_);
  on.synchronize(stream);
  std::copy(sent.begin(), sent.end(), plan.sent.begin());
  std::copy(came.begin(), came.end(), plan.came.begin());
}

void rail::cross(const std::vector<std::size_t>& from, std::size_t to, std::size_t bytes_each,
                 const std::vector<std::size_t>& sent, const std::vector<std::size_t>& came,
                 native_stream stream) {
  const auto size = static_cast<std::size_t>(heap_.region().ranks().size());
  std::vector<outgoing_block> out(size);
  std::vector<incoming_block> in(size);
  const std::size_t block = options_.max_tokens * bytes_each;
  for (std::size_t node = 0; node < peers_.size(); ++node) {
    if (node == static_cast<std::size_t>(map_.node)) continue;
    const auto r = static_cast<std::size_t>(peers_[node].value);
    out[r] = {from[node], to + static_cast<std::size_t>(map_.node) * block,
              sent[node] * bytes_each};
    in[r] = {to + node * block, came[node] * bytes_each};
  }
  channel_.all_to_all_v(out, in, stream);
}

token_arrays rail::gather(const token_arrays& given, rail_plan& plan, bool again, bool as_gradients,
                          native_stream stream) {
  const token_record record = record_of(as_gradients);
  const token_batch batch{.x = reinterpret_cast<char*>(x_.local()),
                          .scales = record.scale_count > 0 ? scales_.local() : nullptr,
                          .ids = ids_.local(),
                          .weights = weights_.local()};
  token_arrays from = given;
  if (options_.quantize && !as_gradients) {
    // Once, before anything is sent: half as much crosses.
    steps_->quantize(given, static_cast<int>(options_.hidden), batch, stream);
    from.x = batch.x;
    from.scales = batch.scales;
  }
  const auto max_tokens = static_cast<int>(options_.max_tokens);
  const record_blocks outgoing{reinterpret_cast<char*>(outgoing_.local()), record, max_tokens};
  const record_blocks incoming{reinterpret_cast<char*>(incoming_.local()), record, max_tokens};
  if (!again) {
    steps_->place(map_, from, options_.top_k, plan.places.local(), counts_out_.local(), stream);
    plan.own = static_cast<std::size_t>(from.count);
  }
  steps_->pack(map_, from, plan.places.local(), outgoing, stream);
  if (!again) exchange_counts(plan, stream);
  std::vector<std::size_t> blocks;
  batch_counts counts{.own = from.count};
  int count = from.count;
  for (std::size_t node = 0; node < plan.came.size(); ++node) {
    blocks.push_back(outgoing_.offset() + node * options_.max_tokens * record.bytes());
    counts.came[node] = static_cast<std::int32_t>(plan.came[node]);
    count += counts.came[node];
  }
  cross(blocks, incoming_.offset(), record.bytes(), plan.sent, plan.came, stream);
  steps_->unpack(map_, from, incoming, counts, batch, stream);
  return {.x = batch.x,
          .scales = batch.scales,
          .ids = batch.ids,
          .weights = batch.weights,
          .count = count};
}

combine_output rail::sums(const combine_output& wanted) const {
  return {.sums = sums_.local(),
          .weight_gradients = wanted.weight_gradients == nullptr ? nullptr : weight_sums_.local(),
          .ids = ids_.local()};
}

void rail::scatter(const rail_plan& plan, const combine_output& to, native_stream stream) {
  const auto back = [&](const auto& sums, const auto& returns, std::size_t bytes_each) {
    std::vector<std::size_t> blocks;
    std::size_t row = plan.own;
    for (const std::size_t came : plan.came) {
      blocks.push_back(sums.offset() + row * bytes_each);
      row += came;
    }
    cross(blocks, returns.offset(), bytes_each, plan.came, plan.sent, stream);
  };
  back(sums_, returns_, options_.hidden * sizeof(std::uint16_t));
  if (to.weight_gradients != nullptr) {
    back(weight_sums_, weight_returns_, static_cast<std::size_t>(options_.top_k) * sizeof(float));
  }
  const combine_output returned{.sums = returns_.local(),
                                .weight_gradients = weight_returns_.local()};
  steps_->add(map_, static_cast<int>(plan.own), plan.places.local(),
              static_cast<int>(options_.max_tokens), static_cast<int>(options_.hidden),
              options_.top_k, sums(to), returned, to, stream);
}

}  // namespace evmm::ep
