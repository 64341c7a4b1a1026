// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/fixed_rail.hpp"

#include "lib/support/log.hpp"

#include <evmm/error.hpp>

namespace evmm::ep {

fixed_rail::fixed_rail(symmetric_heap& heap, symmetric_channel& channel,
                       const low_latency_options& options)
    : way_(heap, channel, rail_options_of("ep::low_latency_exchange", options)),
      sets_{make_set(), make_set()},
      given_(way_.on(), heap.region().device()),
      own_(way_.on().create_stream(heap.region().device())) {
  // Records that never came choose nobody.
  for (const buffer_set& set : sets_) {
    const symmetric_buffer<std::byte>& to = set.buffers.incoming;
    way_.on().fill(reinterpret_cast<address>(to.local()), std::byte{0xff}, to.bytes(), own_);
  }
}

fixed_rail::buffer_set fixed_rail::make_set() const {
  return {.buffers = way_.make_buffers(false),
          .places = way_.make_places(),
          .done = scoped_event(way_.on(), way_.heap().region().device())};
}

fixed_rail::~fixed_rail() {
  log_failure("waiting for a rail's stream", [&] { way_.on().synchronize(own_); });
  log_failure("destroying a rail's stream", [&] { way_.on().destroy_stream(own_); });
}

void fixed_rail::check_call(native_stream stream) const {
  check();
  if (way_.on().capture(stream).status == capture_status::none) return;
  throw unsupported("ep::low_latency_exchange: what crosses nodes cannot be captured",
                    "call it between launches of the graph");
}

template <class T>
void fixed_rail::cross(const symmetric_buffer<T>& from, const symmetric_buffer<T>& to) {
  const std::size_t bytes = from.bytes() / nodes();
  std::vector<rail_block> blocks;
  for (std::size_t node = 0; node < nodes(); ++node) {
    blocks.push_back({.from = from.offset() + node * bytes, .sent = bytes, .came = bytes});
  }
  way_.cross(blocks, to.offset(), bytes, own_);
}

token_arrays fixed_rail::gather(int set, const token_arrays& given, native_stream stream) {
  const buffer_set& with = of(set);
  const token_record record = way_.record();
  const token_batch batch = with.buffers.batch(record);
  const token_batch own = batch.from(own_row(), record);
  const token_arrays from = way_.prepare(given, own, stream);
  way_.steps().pack_in_place(way_.map(), from, with.places.local(),
                             way_.blocks(with.buffers.outgoing, record), own, stream);
  follow(stream);
  cross(with.buffers.outgoing, with.buffers.incoming);
  way_.steps().unpack_in_place(way_.map(), way_.blocks(with.buffers.incoming, record), batch, own_);
  return {.x = batch.x,
          .scales = batch.scales,
          .ids = batch.ids,
          .weights = batch.weights,
          .count = batch_size()};
}

void fixed_rail::follow(native_stream stream) {
  way_.on().record(given_.get(), stream);
  way_.on().wait(own_, given_.get());
}

void fixed_rail::scatter(int set) {
  cross(of(set).buffers.sums, of(set).buffers.returns);
}

void fixed_rail::mark(int set) {
  way_.on().record(of(set).done.get(), own_);
}

void fixed_rail::join(int set, native_stream stream) {
  way_.on().wait(stream, of(set).done.get());
}

void fixed_rail::add(int set, int count, const combine_output& to, native_stream stream) {
  const rail_options& options = way_.options();
  const buffer_set& with = of(set);
  const combine_output own{.sums = with.buffers.sums.local() + own_row() * options.hidden};
  way_.steps().add(way_.map(), count, with.places.local(), static_cast<int>(options.max_tokens),
                   static_cast<int>(options.hidden), options.top_k, own,
                   {.sums = with.buffers.returns.local()}, to, stream);
}

}  // namespace evmm::ep
