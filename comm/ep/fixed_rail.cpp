// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/fixed_rail.hpp"

#include "comm/collective_change.hpp"

#include <evmm/error.hpp>

#include <utility>

namespace evmm::ep {

namespace {
constexpr const char* k_name = "ep::low_latency_exchange";
}  // namespace

fixed_rail_buffers::buffer_set::buffer_set(heap_source& from, const low_latency_options& options,
                                           std::size_t nodes)
    : rows(from, rail_options_of(k_name, options), nodes, false),
      places(make_places(from, options.max_tokens, nodes)) {}

fixed_rail_buffers::fixed_rail_buffers(heap_source& from, const low_latency_options& options,
                                       const job_shape& job)
    : rank_map(make_rank_map(from, job.ranks)),
      sets{buffer_set(from, options, static_cast<std::size_t>(job.nodes)),
           buffer_set(from, options, static_cast<std::size_t>(job.nodes))} {}

fixed_rail::fixed_rail(symmetric_heap& heap, symmetric_channel& channel,
                       const low_latency_options& options, fixed_rail_buffers buffers)
    : way_(heap, channel, rail_options_of(k_name, options), std::move(buffers.rank_map)),
      buffers_(std::move(buffers)) {
  agree_on(heap.region().ranks(), "ep::low_latency_exchange: rail's stream", [&] {
    driver& on = way_.on();
    const device_id device = heap.region().device();
    given_.emplace(on, device);
    for (auto& event : done_) event.emplace(on, device);
    own_.emplace(on, device);
    // Records that never came choose nobody.
    for (const buffer_set& set : buffers_.sets) {
      const symmetric_buffer<std::byte>& to = set.rows.incoming;
      on.fill(reinterpret_cast<address>(to.local()), std::byte{0xff}, to.bytes(), own_stream());
    }
  });
}

template <class T>
void fixed_rail::cross(const symmetric_buffer<T>& from, const symmetric_buffer<T>& to,
                       std::size_t most) {
  const std::size_t stride = from.bytes() / nodes();
  const std::size_t bytes = stride / way_.options().max_tokens * most;
  std::vector<rail_block> blocks;
  for (std::size_t node = 0; node < nodes(); ++node) {
    blocks.push_back({.from = from.offset() + node * stride, .sent = bytes, .came = bytes});
  }
  way_.cross(blocks, to.offset(), stride, own_stream());
}

token_arrays fixed_rail::gather(int set, const token_arrays& given, std::size_t most,
                                native_stream stream) {
  const buffer_set& with = of(set);
  const token_record record = way_.options().record();
  const token_batch batch = with.rows.batch(record);
  const token_batch own = batch.from(own_row(), record);
  const token_arrays from = way_.prepare(given, own, stream);
  way_.steps().pack_in_place(way_.map(), from, with.places.local(),
                             way_.blocks(with.rows.outgoing, record), own, stream);
  follow(stream);
  cross(with.rows.outgoing, with.rows.incoming, most);
  way_.steps().unpack_in_place(way_.map(), way_.blocks(with.rows.incoming, record), batch,
                               own_stream());
  return {.x = batch.x,
          .scales = batch.scales,
          .ids = batch.ids,
          .weights = batch.weights,
          .count = batch_size()};
}

void fixed_rail::follow(native_stream stream) {
  way_.on().record(given_->get(), stream);
  way_.on().wait(own_stream(), given_->get());
}

void fixed_rail::scatter(int set, std::size_t most) {
  cross(of(set).rows.sums, of(set).rows.returns, most);
}

void fixed_rail::mark(int set) {
  way_.on().record(done(set), own_stream());
}

void fixed_rail::join(int set, native_stream stream) {
  way_.on().wait(stream, done(set));
}

void fixed_rail::add(int set, int count, const combine_output& to, native_stream stream) {
  const rail_options& options = way_.options();
  const buffer_set& with = of(set);
  const combine_output own{.sums = with.rows.sums.local() + own_row() * options.hidden};
  way_.steps().add(way_.map(), count, with.places.local(), static_cast<int>(options.max_tokens),
                   static_cast<int>(options.hidden), options.top_k, own,
                   {.sums = with.rows.returns.local()}, to, stream);
}

}  // namespace evmm::ep
