// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"
#include "comm/ep/common_options.hpp"
#include "comm/ep/exchange_state.hpp"
#include "lib/support/patience.hpp"

#include <evmm/ep/exchange.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <utility>

namespace evmm::ep {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& help) {
  throw invalid_argument("cannot " + what, help);
}

}  // namespace

plan::plan(std::unique_ptr<state> made) : state_(std::move(made)) {}
plan::plan(plan&&) noexcept = default;
plan& plan::operator=(plan&&) noexcept = default;
plan::~plan() = default;
std::size_t plan::tokens() const noexcept {
  return state_ == nullptr ? 0 : state_->count;
}

token_arrays exchange::state::arrays_of(const tokens& from, bool as_gradients) const {
  return check_tokens(
      from, {.max_tokens = options.max_tokens,
             .scales = options.rows == payload::fp8 && !options.quantize && !as_gradients});
}

received exchange::state::output() const {
  const exchange_buffers& own = *buffers;
  received out{.x = own.x->local(),
               .scales = own.scales ? own.scales.local() : nullptr,
               .experts = own.experts.local(),
               .weights = own.weights.local(),
               .tokens = own.tokens.local(),
               .rows = totals.words,
               .source_end = totals.words + 1,
               .expert_tokens = totals.words + 1 + shape.ranks,
               .capacity = own.capacity};
  if (by_expert()) {
    out.x = own.expert_x->local();
    out.scales = experts_at.scales;
    out.expert_begin = experts_at.begin;
    out.row_experts = experts_at.row_experts;
    out.row_places = experts_at.row_places;
    out.expert_rows = experts_at.expert_rows;
    out.expert_capacity = own.expert_capacity;
  }
  return out;
}

ep_shape exchange::state::gradient_shape() const {
  ep_shape as = shape;
  as.x = shape.y;
  as.row_bytes = static_cast<std::uint32_t>(options.hidden * sizeof(std::uint16_t));
  as.scale_count = 0;
  as.quantize = false;
  return as;
}

void exchange::state::see_device_rows() {
  options.device_rows = std::min(buffers->x->device_rows(), buffers->y->device_rows());
  if (by_expert()) {
    options.device_expert_rows =
        std::min(buffers->expert_x->device_rows(), buffers->expert_y->device_rows());
  }
}

bool exchange::state::captured(native_stream stream) const {
  return on().capture(stream).status != capture_status::none;
}

void exchange::state::check_in_step() const {
  if (!out_of_step) return;
  throw driver_error(
      "a dispatch of this exchange failed between its steps: this rank told the "
      "others of rows that it did not send",
      "make another exchange on all ranks");
}

void exchange::state::begin_call(native_stream stream) {
  if (across) across->check_call(stream);
  check_in_step();
  if (!captured(stream) && std::find(streams.begin(), streams.end(), stream) == streams.end()) {
    streams.push_back(stream);
  }
}

void exchange::state::check_made_here(const plan& given) const {
  if (given.state_ != nullptr && given.state_->maker == this) return;
  refuse("use a plan that this exchange did not make, or that was moved from",
         "make_plan() of the exchange that sends by it");
}

void exchange::state::check_filled(const plan& by) const {
  check_made_here(by);
  if (by.state_->call != 0) return;
  refuse("send or sum by a plan that no dispatch has filled", "give it to dispatch() first");
}

void exchange::state::check_last(const plan& by, native_stream stream) const {
  // Calls in a graph run in the order of its replays.
  if (by.state_->call == calls_that_sent || captured(stream)) return;
  refuse(fmt::format("sum by the plan of call {} that sent rows: what there is of choices is that "
                     "of call {}",
                     by.state_->call, calls_that_sent),
         "sum before other rows are sent, or make an exchange for each that is under way");
}

template <class Steps>
void exchange::state::in_step(native_stream stream, const Steps& rest) {
  out_of_step = !captured(stream);  // what is captured runs as a whole, or not at all
  rest();
  out_of_step = false;
}

void exchange::state::send(const ep_shape& as, const token_arrays& from, const plan& by,
                           native_stream stream) {
  if (!captured(stream)) ++ticket;
  steps->send(as, from, by.state_->arrays(), totals, ticket, stream);
  by.state_->call = ++calls_that_sent;
  if (by_expert()) steps->place(shape, experts_at, stream);
}

token_arrays exchange::state::batch_of(const token_arrays& from, const plan& by, bool again,
                                       bool as_gradients, native_stream stream) {
  out_of_step = across != nullptr;  // until the rest of the call is done
  const token_arrays batch =
      across ? across->gather(from, by.state_->nodes, again, as_gradients, stream) : from;
  by.state_->batch = batch.count;
  return batch;
}

void exchange::state::sum(const plan& by, const combine_output& to, bool gradients,
                          native_stream stream) {
  if (by_expert()) steps->unpermute(shape, experts_at, !gradients, stream);
  // Those of weights cross whoever wants them: a rank need not know what others give.
  const bool with_weights = gradients && by.state_->call == calls_that_sent;
  const auto combine = [&](const combine_output& into) {
    steps->combine(shape, by.state_->batch, by.state_->arrays(), into, totals, stream);
  };
  if (!across) return combine(to);
  in_step(stream, [&] {
    combine(across->sums(with_weights));
    across->scatter(by.state_->nodes, to, with_weights, stream);
  });
}

exchange::exchange(symmetric_heap& heap, const exchange_options& options)
    : state_(std::make_unique<state>(heap, nullptr, options)) {}
exchange::exchange(symmetric_heap& heap, symmetric_channel& across, const exchange_options& options)
    : state_(std::make_unique<state>(heap, &across, options)) {}
exchange::~exchange() = default;

plan exchange::make_plan() {
  state& s = *state_;
  heap_source from(s.heap);
  auto made =
      std::make_unique<plan::state>(&s, from, s.shape, s.options.max_tokens,
                                    static_cast<std::size_t>(s.heap.region().ranks().node_count()));
  from.settle();
  return plan(std::move(made));
}

received exchange::dispatch(const tokens& from, plan& to, native_stream stream) {
  state& s = *state_;
  s.check_made_here(to);
  const token_arrays given = s.arrays_of(from, false);
  s.begin_call(stream);
  to.state_->call = 0;
  to.state_->count = from.count;
  const token_arrays arrays = s.batch_of(given, to, false, false, stream);
  s.steps->plan(s.shape, arrays, to.state_->arrays(), s.totals, stream);
  s.in_step(stream, [&] {
    s.send(s.shape, arrays, to, stream);
    if (s.by_expert()) s.steps->permute(s.shape, s.experts_at, stream);
  });
  return s.output();
}

token_arrays exchange::state::arrays_of_plan(const tokens& from, const plan& by,
                                             bool as_gradients) const {
  check_filled(by);
  const token_arrays arrays = arrays_of(from, as_gradients);
  if (from.count == by.tokens()) return arrays;
  refuse(fmt::format("send {} tokens by a plan of {}", from.count, by.tokens()),
         "give the tokens in the order of the dispatch that filled the plan");
}

received exchange::dispatch_again(const tokens& from, const plan& by, native_stream stream) {
  state& s = *state_;
  const token_arrays given = s.arrays_of_plan(from, by, false);
  s.begin_call(stream);
  const token_arrays arrays = s.batch_of(given, by, true, false, stream);
  s.steps->plan_again(s.shape, by.state_->arrays(), s.totals, stream);
  s.in_step(stream, [&] {
    s.send(s.shape, arrays, by, stream);
    if (s.by_expert()) s.steps->permute(s.shape, s.experts_at, stream);
  });
  return s.output();
}

void* exchange::combine_buffer() const {
  return (state_->by_expert() ? state_->buffers->expert_y : state_->buffers->y)->local();
}

void exchange::combine(const plan& by, void* out, const void* bias, native_stream stream) {
  state& s = *state_;
  s.check_filled(by);
  if (s.by_expert()) s.check_last(by, stream);
  if (by.tokens() > 0 && (out == nullptr || !aligned_rows(out) || !aligned_rows(bias))) {
    refuse(fmt::format("combine into {} with bias {}", out, bias), "give rows aligned to 16 bytes");
  }
  s.begin_call(stream);
  s.sum(by, {.sums = out, .bias = bias}, false, stream);
}

received exchange::combine_backward(const tokens& sums, const plan& by, const void* outputs,
                                    native_stream stream) {
  state& s = *state_;
  const token_arrays given = s.arrays_of_plan(sums, by, true);
  if (outputs != nullptr && (!s.by_expert() || !aligned_rows(outputs))) {
    refuse(fmt::format("make weights' gradients from outputs at {}", outputs),
           s.by_expert() ? "give rows aligned to 16 bytes"
                         : "by source the user writes them to weight_gradients()");
  }
  s.begin_call(stream);
  const token_arrays arrays = s.batch_of(given, by, true, true, stream);
  s.steps->plan_again(s.shape, by.state_->arrays(), s.totals, stream);
  s.in_step(stream, [&] {
    s.send(s.gradient_shape(), arrays, by, stream);
    if (s.by_expert()) s.steps->permute_gradients(s.shape, s.experts_at, outputs, stream);
  });
  received out = s.output();
  out.x = combine_buffer();
  out.scales = nullptr;
  return out;
}

float* exchange::weight_gradients() const {
  return state_->buffers->weight_gradients.local();
}

void exchange::dispatch_backward(const plan& by, void* x, const std::int64_t* topk_ids,
                                 float* weights, native_stream stream) {
  state& s = *state_;
  s.check_filled(by);
  if (s.by_expert() || (s.across && weights != nullptr)) s.check_last(by, stream);
  if (by.tokens() > 0 && (x == nullptr || !aligned_rows(x))) {
    refuse(fmt::format("sum gradients into {}", x), "give rows aligned to 16 bytes");
  }
  if (weights != nullptr && topk_ids == nullptr) {
    refuse("bring back the gradients of weights: topk_ids is null", "give those of the dispatch");
  }
  s.begin_call(stream);
  s.sum(by, {.sums = x, .weight_gradients = weights, .ids = topk_ids}, true, stream);
}

row_counts exchange::counts() {
  state& s = *state_;
  s.check_in_step();
  const auto end = std::chrono::steady_clock::now() + s.options.timeout + s.options.timeout;
  for (patience wait; read_signal(s.totals.ticket_on_host) < s.ticket; wait.spend()) {
    if (std::chrono::steady_clock::now() > end) {
      check();
      throw timed_out(fmt::format("the counts of dispatch {} did not come within {} ms", s.ticket,
                                  2 * s.options.timeout.count()),
                      "is the stream waiting for something else?");
    }
  }
  const std::int32_t* word = s.totals.on_host;
  row_counts all{.rows = static_cast<std::size_t>(*word++),
                 .by_source = {},
                 .by_expert = {},
                 .expert_begin = {}};
  for (int r = 0; r < s.shape.ranks; ++r) {
    const std::int32_t begin =
        r == s.shape.rank ? 0 : word[(r + s.shape.ranks - 1) % s.shape.ranks];
    all.by_source.push_back(static_cast<std::size_t>(word[r] - begin));
  }
  word += s.shape.ranks;
  const std::size_t alignment = s.options.expert_alignment;
  for (int e = 0; e < s.shape.local_experts; ++e, ++word) {
    const auto rows = static_cast<std::size_t>(*word);
    all.by_expert.push_back(rows);
    if (!s.by_expert()) continue;
    all.expert_begin.push_back(all.expert_rows);
    all.expert_rows += (rows + alignment - 1) / alignment * alignment;
  }
  if (s.by_expert()) all.expert_begin.push_back(all.expert_rows);
  const auto beyond = [](std::size_t rows, std::size_t most) {
    return rows - std::min(rows, most);
  };
  all.spilled = beyond(all.rows, s.options.device_rows);
  all.spilled_expert_rows = beyond(all.expert_rows, s.options.device_expert_rows);
  return all;
}

std::size_t exchange::adapt(double headroom, const uses& in_use) {
  state& s = *state_;
  bootstrap& ranks = s.heap.region().ranks();
  std::vector<native_stream> streams = s.streams;
  streams.insert(streams.end(), in_use.streams.begin(), in_use.streams.end());
  agree_on(ranks, "ep::exchange: adapt", [&] {
    if (!(headroom >= 1 && headroom <= 1000)) {
      refuse(fmt::format("adapt with a headroom of {}", headroom), "give 1 to 1,000");
    }
    for (const native_stream stream : streams) s.on().synchronize(stream);
    for (const native_event event : in_use.events) s.on().synchronize(event);
  });
  struct most_rows {
    double headroom;
    std::uint64_t received, by_expert;
  };
  std::uint64_t* const words[] = {s.totals.most_rows_on_host, s.experts_at.most_rows_on_host};
  const auto read = [](const std::uint64_t* word) { return word == nullptr ? 0 : *word; };
  const auto said = ranks.all_gather_value(most_rows{headroom, read(words[0]), read(words[1])},
                                           "ep::exchange: most rows");
  most_rows all{};
  for (std::size_t r = 0; r < said.size(); ++r) {
    alike("ep::exchange: adapt", r)("headroom", said[0].headroom, said[r].headroom);
    all.received = std::max(all.received, said[r].received);
    all.by_expert = std::max(all.by_expert, said[r].by_expert);
  }
  const auto follow = [&](tier kind, std::optional<elastic_rows>& rows, std::uint64_t most) {
    if (!rows || most == 0) return;
    rows->move_border(kind,
                      static_cast<std::size_t>(std::ceil(static_cast<double>(most) * headroom)),
                      {.streams = streams, .events = in_use.events});
  };
  try {
    // What leaves the device makes room there for what comes, of whichever buffer.
    for (const tier kind : {tier::host, tier::device}) {
      follow(kind, s.buffers->x, all.received);
      follow(kind, s.buffers->y, all.received);
      follow(kind, s.buffers->expert_x, all.by_expert);
      follow(kind, s.buffers->expert_y, all.by_expert);
    }
  } catch (...) {
    s.see_device_rows();
    throw;
  }
  s.see_device_rows();
  for (std::uint64_t* const word : words) {
    if (word != nullptr) *word = 0;
  }
  s.streams.clear();
  return s.options.device_rows;
}

void exchange::check() {
  const std::uint64_t lost = read_signal(state_->totals.lost_on_host);
  std::string text;
  const std::vector<rank_id>& ranks = state_->heap.region().ranks().node_ranks();
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if ((lost >> r & 1) != 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", ranks[r].value);
  }
  if (!text.empty()) {
    throw peer_error(fmt::format("ranks {} did not come to an exchange within {} ms", text,
                                 state_->options.timeout.count()),
                     "do all ranks make the same calls? raise exchange_options::timeout");
  }
  if (state_->across) state_->across->check();
  check_choices(state_->totals, state_->options.experts);
}

const exchange_options& exchange::options() const noexcept {
  return state_->options;
}
std::size_t exchange::capacity() const noexcept {
  return state_->buffers->capacity;
}
std::size_t exchange::expert_capacity() const noexcept {
  return state_->buffers->expert_capacity;
}

}  // namespace evmm::ep
