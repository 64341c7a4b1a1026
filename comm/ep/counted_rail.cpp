// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/counted_rail.hpp"

#include <algorithm>

namespace evmm::ep {

counted_rail::counted_rail(symmetric_heap& heap, symmetric_channel& channel,
                           const exchange_options& options)
    : way_(heap, channel, rail_options_of("ep::exchange", options)),
      buffers_(way_.make_buffers(true)),
      counts_out_(way_.make<std::int64_t>(nodes())),
      counts_in_(way_.make<std::int64_t>(nodes())) {
  const std::size_t choices =
      nodes() * options.max_tokens * static_cast<std::size_t>(options.top_k);
  weight_sums_ = way_.make<float>(choices);
  weight_returns_ = way_.make<float>(choices);
}

rail_plan counted_rail::make_plan() const {
  return {.places = way_.make_places(),
          .sent = std::vector<std::size_t>(nodes()),
          .came = std::vector<std::size_t>(nodes())};
}

void counted_rail::exchange_counts(rail_plan& plan, native_stream stream) {
  constexpr std::size_t word = sizeof(std::int64_t);
  std::vector<rail_block> blocks;
  for (std::size_t node = 0; node < nodes(); ++node) {
    blocks.push_back({.from = counts_out_.offset() + node * word, .sent = word, .came = word});
  }
  way_.cross(blocks, counts_in_.offset(), word, stream);
  // A copy to pageable memory blocks inside the driver: not while the stream waits for messages.
  way_.channel().synchronize(stream);
  std::vector<std::int64_t> sent(nodes()), came(nodes());
  const auto read = [&](std::vector<std::int64_t>& to, const symmetric_buffer<std::int64_t>& from) {
    way_.on().copy(reinterpret_cast<address>(to.data()), reinterpret_cast<address>(from.local()),
                   from.bytes(), stream);
  };
  read(sent, counts_out_);
  read(came, counts_in_);
  way_.on().synchronize(stream);
  came[way_.here()] = 0;
  std::copy(sent.begin(), sent.end(), plan.sent.begin());
  std::copy(came.begin(), came.end(), plan.came.begin());
}

token_arrays counted_rail::gather(const token_arrays& given, rail_plan& plan, bool again,
                                  bool as_gradients, native_stream stream) {
  const token_record record = way_.record(as_gradients);
  const token_batch batch = buffers_.batch(record);
  const token_arrays from = as_gradients ? given : way_.prepare(given, batch, stream);
  if (!again) {
    way_.steps().place(way_.map(), from, record.top_k, plan.places.local(), counts_out_.local(),
                       stream);
    plan.own = static_cast<std::size_t>(from.count);
  }
  way_.steps().pack(way_.map(), from, plan.places.local(), way_.blocks(buffers_.outgoing, record),
                    batch, stream);
  if (!again) exchange_counts(plan, stream);
  const std::size_t stride = way_.options().max_tokens * record.bytes();
  std::vector<rail_block> blocks;
  batch_counts counts{.own = from.count};
  int count = from.count;
  for (std::size_t node = 0; node < nodes(); ++node) {
    blocks.push_back({.from = buffers_.outgoing.offset() + node * stride,
                      .sent = plan.sent[node] * record.bytes(),
                      .came = plan.came[node] * record.bytes()});
    counts.came[node] = static_cast<std::int32_t>(plan.came[node]);
    count += counts.came[node];
  }
  way_.cross(blocks, buffers_.incoming.offset(), stride, stream);
  way_.steps().unpack(way_.map(), way_.blocks(buffers_.incoming, record), counts, batch, stream);
  return {.x = batch.x,
          .scales = batch.scales,
          .ids = batch.ids,
          .weights = batch.weights,
          .count = count};
}

combine_output counted_rail::sums(const combine_output& wanted) const {
  return {.sums = buffers_.sums.local(),
          .weight_gradients = wanted.weight_gradients == nullptr ? nullptr : weight_sums_.local(),
          .ids = buffers_.ids.local()};
}

void counted_rail::scatter(const rail_plan& plan, const combine_output& to, native_stream stream) {
  const rail_options& options = way_.options();
  const auto back = [&](const auto& sums, const auto& returns, std::size_t bytes_each) {
    std::vector<rail_block> blocks;
    std::size_t row = plan.own;
    for (std::size_t node = 0; node < nodes(); ++node) {
      blocks.push_back({.from = sums.offset() + row * bytes_each,
                        .sent = plan.came[node] * bytes_each,
                        .came = plan.sent[node] * bytes_each});
      row += plan.came[node];
    }
    way_.cross(blocks, returns.offset(), options.max_tokens * bytes_each, stream);
  };
  back(buffers_.sums, buffers_.returns, way_.sum_bytes());
  if (to.weight_gradients != nullptr) {
    back(weight_sums_, weight_returns_, static_cast<std::size_t>(options.top_k) * sizeof(float));
  }
  const combine_output returned{.sums = buffers_.returns.local(),
                                .weight_gradients = weight_returns_.local()};
  way_.steps().add(way_.map(), static_cast<int>(plan.own), plan.places.local(),
                   static_cast<int>(options.max_tokens), static_cast<int>(options.hidden),
                   options.top_k, sums(to), returned, to, stream);
}

}  // namespace evmm::ep
