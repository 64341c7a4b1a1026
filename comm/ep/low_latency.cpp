// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/common_options.hpp"
#include "comm/ep/low_latency_state.hpp"

#include <evmm/ep/low_latency.hpp>

#include <fmt/format.h>

namespace evmm::ep {

namespace {

const char* waits_for(stage at) {
  return at == stage::sent ? "wait_dispatch()" : "wait_combine()";
}

}  // namespace

low_latency_buffers& low_latency_exchange::state::set_of(const round& of, stage wanted,
                                                         const char* call) {
  low_latency_buffers& set = memory->sets[index_of(of)];
  if (set.number != of.number_ || of.number_ == 0) {
    refuse_low_latency(fmt::format("{} of dispatch {}, whose buffers dispatch {} has by now", call,
                                   of.number_, set.number),
                       "two dispatches may be under way at once");
  }
  if (set.at != wanted) {
    refuse_low_latency(fmt::format("{} of dispatch {}, which is {}", call, of.number_,
                                   set.at == stage::over       ? "over"
                                   : set.at == stage::sent     ? "not waited for yet"
                                   : set.at == stage::received ? "not combined yet"
                                                               : "being combined"),
                       "issue and wait once for its dispatch, then for its combine");
  }
  return set;
}

token_arrays low_latency_exchange::state::arrays_of(const tokens& from) const {
  return check_tokens(from, {.max_tokens = options.max_tokens,
                             .scales = options.rows == payload::fp8 && !options.quantize});
}

low_latency_exchange::round low_latency_exchange::state::issue(const tokens& from, bool whole,
                                                               native_stream stream) {
  token_arrays arrays = arrays_of(from);
  round made;
  made.number_ = issued + 1;
  made.count_ = from.count;
  made.most_ = from.most != 0 ? from.most : options.max_tokens;
  const int index = index_of(made);
  low_latency_buffers& set = memory->sets[index];
  if (set.at == stage::sent || set.at == stage::returned) {
    refuse_low_latency(
        fmt::format("dispatch {} would take the buffers of dispatch {}, whose {} is missing",
                    made.number_, set.number, waits_for(set.at)),
        "two dispatches may be under way at once");
  }
  // Where it is not combined, the next one's rows tell that the peers are past it.
  if (set.at == stage::received && memory->sets[1 - index].at == stage::sent) {
    refuse_low_latency(
        fmt::format("dispatch {} would take the buffers of dispatch {}, which peers may still read",
                    made.number_, set.number),
        "combine that one, or call wait_dispatch() of the one behind it");
  }
  native_stream sends = stream;
  if (across) {
    across->check_call(stream);
    arrays = across->gather(index, arrays, made.most_, stream);
    sends = across->own_stream();
  }
  steps->issue_dispatch(index, set.shape, set.slot, arrays, totals, whole, sends);
  if (across) across->mark(index);
  set.number = ++issued;
  set.at = whole ? stage::received : stage::sent;
  return made;
}

low_latency_received low_latency_exchange::state::wait(const round& of, low_latency_buffers& set,
                                                       native_stream stream) {
  const int index = index_of(of);
  if (across) across->join(index, stream);
  steps->wait_dispatch(index, set.shape, set.slot, by_expert() ? &set.layout : nullptr, totals,
                       stream);
  set.at = stage::received;
  return output(set);
}

void low_latency_exchange::state::return_sums(const round& of, const low_latency_buffers& set,
                                              native_stream stream) {
  const int index = index_of(of);
  across->follow(stream);
  steps->wait_combine(index, set.shape, set.slot, memory->batch, across->sums(index), totals, false,
                      across->own_stream());
  across->scatter(index, of.most_);
  across->mark(index);
}

low_latency_received low_latency_exchange::state::output(const low_latency_buffers& set) const {
  low_latency_received out{.x = set.x.local(),
                           .scales = set.scales ? set.scales.local() : nullptr,
                           .experts = set.experts.local(),
                           .weights = set.weights.local(),
                           .tokens = set.tokens.local(),
                           .source_rows = set.source_rows.local()};
  if (by_expert()) {
    out.x = set.layout.x;
    out.scales = set.layout.scales;
    out.expert_rows = set.layout.expert_rows;
    out.row_places = set.layout.row_places;
    out.expert_tokens = set.layout.expert_tokens;
  }
  return out;
}

void low_latency_exchange::state::check_output(const round& of, const void* out,
                                               const void* bias) const {
  if (of.count_ > 0 && (out == nullptr || !aligned_rows(out) || !aligned_rows(bias))) {
    refuse_low_latency(fmt::format("combine into {} with bias {}", out, bias),
                       "give rows aligned to 16 bytes");
  }
}

low_latency_exchange::low_latency_exchange(symmetric_heap& heap, const low_latency_options& options)
    : state_(std::make_unique<state>(heap, nullptr, options)) {}
low_latency_exchange::low_latency_exchange(symmetric_heap& heap, symmetric_channel& across,
                                           const low_latency_options& options)
    : state_(std::make_unique<state>(heap, &across, options)) {}
low_latency_exchange::~low_latency_exchange() = default;

low_latency_exchange::round low_latency_exchange::issue_dispatch(const tokens& from,
                                                                 native_stream stream) {
  return state_->issue(from, false, stream);
}

low_latency_received low_latency_exchange::wait_dispatch(const round& of, native_stream stream) {
  state& s = *state_;
  low_latency_buffers& set = s.set_of(of, stage::sent, "wait_dispatch()");
  return s.wait(of, set, stream);
}

void* low_latency_exchange::combine_buffer(const round& of) const {
  const low_latency_buffers& set = state_->memory->sets[state_->index_of(of)];
  return state_->by_expert() ? set.expert_y.local() : set.y.local();
}

void low_latency_exchange::issue_combine(const round& of, native_stream stream) {
  state& s = *state_;
  low_latency_buffers& set = s.set_of(of, stage::received, "issue_combine()");
  if (s.across) s.across->check_call(stream);
  if (s.by_expert()) s.local_steps->unpermute(set.shape, set.layout, true, stream);
  s.steps->issue_combine(set.shape, set.slot, stream);
  if (s.across) s.return_sums(of, set, stream);
  set.at = stage::returned;
}

void low_latency_exchange::wait_combine(const round& of, void* out, const void* bias,
                                        native_stream stream) {
  state& s = *state_;
  low_latency_buffers& set = s.set_of(of, stage::returned, "wait_combine()");
  s.check_output(of, out, bias);
  const int index = s.index_of(of);
  const auto count = static_cast<int>(of.count_);
  if (s.across) {
    s.across->join(index, stream);
    s.across->add(index, count, {.sums = out, .bias = bias}, stream);
  } else {
    s.steps->wait_combine(index, set.shape, set.slot, count, {.sums = out, .bias = bias}, s.totals,
                          false, stream);
  }
  set.at = stage::over;
}

low_latency_received low_latency_exchange::dispatch(const tokens& from, round& of,
                                                    native_stream stream) {
  state& s = *state_;
  // By expert the kernel that arranges the rows waits for them itself.
  const bool whole = !s.by_expert() && !s.across;
  of = s.issue(from, whole, stream);
  low_latency_buffers& set = s.memory->sets[s.index_of(of)];
  return whole ? s.output(set) : s.wait(of, set, stream);
}

void low_latency_exchange::combine(const round& of, void* out, const void* bias,
                                   native_stream stream) {
  state& s = *state_;
  low_latency_buffers& set = s.set_of(of, stage::received, "combine()");
  s.check_output(of, out, bias);
  if (s.across) {
    issue_combine(of, stream);
    wait_combine(of, out, bias, stream);
    return;
  }
  if (s.by_expert()) s.local_steps->unpermute(set.shape, set.layout, true, stream);
  s.steps->wait_combine(s.index_of(of), set.shape, set.slot, static_cast<int>(of.count_),
                        {.sums = out, .bias = bias}, s.totals, true, stream);
  set.at = stage::over;
}

std::uint64_t low_latency_exchange::dead_ranks() const {
  return read_signal(state_->totals.lost_on_host);
}

void low_latency_exchange::check() {
  if (state_->across) state_->across->check();
  check_choices(state_->totals, state_->options.experts);
}

const low_latency_options& low_latency_exchange::options() const noexcept {
  return state_->options;
}

}  // namespace evmm::ep
