// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/counted_rail.hpp"

#include <algorithm>
#include <utility>

namespace evmm::ep {

namespace {
constexpr const char* k_name = "ep::exchange";
}  // namespace

counted_rail_buffers::counted_rail_buffers(heap_source& from, const exchange_options& options,
                                           const job_shape& job)
    : rank_map(make_rank_map(from, job.ranks)),
      rows(from, rail_options_of(k_name, options), static_cast<std::size_t>(job.nodes), true) {
  const auto nodes = static_cast<std::size_t>(job.nodes);
  counts_out = make_rail_buffer<std::int64_t>(from, nodes);
  counts_in = make_rail_buffer<std::int64_t>(from, nodes);
  const std::size_t choices = nodes * options.max_tokens * static_cast<std::size_t>(options.top_k);
  weight_sums = make_rail_buffer<float>(from, choices);
  weight_returns = make_rail_buffer<float>(from, choices);
}

counted_rail::counted_rail(symmetric_heap& heap, symmetric_channel& channel,
                           const exchange_options& options, counted_rail_buffers buffers)
    : way_(heap, channel, rail_options_of(k_name, options), std::move(buffers.rank_map)),
      buffers_(std::move(buffers)) {}

void counted_rail::exchange_counts(rail_plan& plan, native_stream stream) {
  constexpr std::size_t word = sizeof(std::int64_t);
  std::vector<rail_block> blocks;
  for (std::size_t node = 0; node < nodes(); ++node) {
    blocks.push_back(
        {.from = buffers_.counts_out.offset() + node * word, .sent = word, .came = word});
  }
  way_.cross(blocks, buffers_.counts_in.offset(), word, stream);
  // A copy to pageable memory blocks inside the driver: not while the stream waits for messages.
  way_.channel().synchronize(stream);
  std::vector<std::int64_t> sent(nodes()), came(nodes());
  const auto read = [&](std::vector<std::int64_t>& to, const symmetric_buffer<std::int64_t>& from) {
    way_.on().copy(reinterpret_cast<address>(to.data()), reinterpret_cast<address>(from.local()),
                   from.bytes(), stream);
  };
  read(sent, buffers_.counts_out);
  read(came, buffers_.counts_in);
  way_.on().synchronize(stream);
  came[way_.here()] = 0;
  std::copy(sent.begin(), sent.end(), plan.sent.begin());
  std::copy(came.begin(), came.end(), plan.came.begin());
}

token_arrays counted_rail::gather(const token_arrays& given, rail_plan& plan, bool again,
                                  bool as_gradients, native_stream stream) {
  const token_record record = way_.options().record(as_gradients);
  const token_batch batch = buffers_.rows.batch(record);
  const token_arrays from = as_gradients ? given : way_.prepare(given, batch, stream);
  if (!again) {
    way_.steps().place(way_.map(), from, record.top_k, plan.places.local(),
                       buffers_.counts_out.local(), stream);
    plan.own = static_cast<std::size_t>(from.count);
  }
  way_.steps().pack(way_.map(), from, plan.places.local(),
                    way_.blocks(buffers_.rows.outgoing, record), batch, stream);
  if (!again) exchange_counts(plan, stream);
  const std::size_t stride = way_.options().max_tokens * record.bytes();
  std::vector<rail_block> blocks;
  batch_counts counts{.own = from.count};
  int count = from.count;
  for (std::size_t node = 0; node < nodes(); ++node) {
    blocks.push_back({.from = buffers_.rows.outgoing.offset() + node * stride,
                      .sent = plan.sent[node] * record.bytes(),
                      .came = plan.came[node] * record.bytes()});
    counts.came[node] = static_cast<std::int32_t>(plan.came[node]);
    count += counts.came[node];
  }
  way_.cross(blocks, buffers_.rows.incoming.offset(), stride, stream);
  way_.steps().unpack(way_.map(), way_.blocks(buffers_.rows.incoming, record), counts, batch,
                      stream);
  return {.x = batch.x,
          .scales = batch.scales,
          .ids = batch.ids,
          .weights = batch.weights,
          .count = count};
}

combine_output counted_rail::sums(bool with_weights) const {
  return {.sums = buffers_.rows.sums.local(),
          .weight_gradients = with_weights ? buffers_.weight_sums.local() : nullptr,
          .ids = buffers_.rows.ids.local()};
}

void counted_rail::scatter(const rail_plan& plan, const combine_output& to, bool with_weights,
                           native_stream stream) {
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
  back(buffers_.rows.sums, buffers_.rows.returns, way_.sum_bytes());
  if (with_weights) {
    back(buffers_.weight_sums, buffers_.weight_returns,
         static_cast<std::size_t>(options.top_k) * sizeof(float));
  }
  const combine_output returned{.sums = buffers_.rows.returns.local(),
                                .weight_gradients = buffers_.weight_returns.local()};
  way_.steps().add(way_.map(), static_cast<int>(plan.own), plan.places.local(),
                   static_cast<int>(options.max_tokens), static_cast<int>(options.hidden),
                   options.top_k, sums(with_weights), returned, to, stream);
}

}  // namespace evmm::ep
