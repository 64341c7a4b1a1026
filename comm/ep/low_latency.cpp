// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"
#include "comm/ep/common_options.hpp"
#include "comm/ep/ep_steps.hpp"
#include "comm/ep/low_latency_steps.hpp"
#include "comm/ep/pinned_words.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/low_latency.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <string>
#include <vector>

namespace evmm::ep {

namespace {

[[noreturn]] void refuse(const std::string& what, const std::string& help) {
  throw invalid_argument("ep::low_latency_exchange: " + what, help);
}

void check_options(const low_latency_options& given, const bootstrap& ranks) {
  check_common_options("ep::low_latency_exchange", given, ranks);
  if (given.max_tokens == 0 || given.max_tokens > 1024) {
    refuse(fmt::format("max_tokens is {}", given.max_tokens),
           "give 1 to 1,024, or use ep::exchange for more");
  }
}

enum : std::size_t { k_lost, k_wrong, k_most_rows, k_host_words };

/// How far a dispatch is.
enum class stage { over, sent, received, returned };

const char* waits_for(stage at) {
  return at == stage::sent ? "wait_dispatch()" : "wait_combine()";
}

/// Buffers of one dispatch under way.
struct buffer_set {
  symmetric_buffer<std::uint64_t> flags, masks;
  symmetric_buffer<std::byte> x;
  symmetric_buffer<float> scales, weights;
  symmetric_buffer<std::int32_t> experts, tokens, source_rows, plan_places, plan_first;
  symmetric_buffer<std::uint16_t> y;
  /// By expert only.
  symmetric_buffer<std::byte> expert_x;
  symmetric_buffer<float> expert_scales;
  symmetric_buffer<std::int32_t> expert_begin, expert_rows, row_experts, row_places, expert_tokens;
  symmetric_buffer<std::uint16_t> expert_y;

  ep_shape shape;
  low_latency_slot slot;
  expert_layout layout;
  stage at = stage::over;
  std::uint64_t number = 0;
};

constexpr std::size_t k_sets = 2;

}  // namespace

struct low_latency_exchange::state {
  state(symmetric_heap& given, const low_latency_options& wanted);
  void take_buffers(buffer_set& set, int ranks);
  driver& on() const { return heap.region().on(); }
  bool by_expert() const { return options.arranged == layout::by_expert; }
  int index_of(const round& of) const { return static_cast<int>(of.number_ % k_sets); }
  /// The buffers of a dispatch that is at `wanted`.
  buffer_set& set_of(const round& of, stage wanted, const char* call);
  token_arrays arrays_of(const tokens& from) const;
  round issue(const tokens& from, bool wait, native_stream stream);
  low_latency_received wait(const round& of, buffer_set& set, native_stream stream);
  low_latency_received output(const buffer_set& set) const;
  void check_output(const round& of, const void* out, const void* bias) const;

  symmetric_heap& heap;
  low_latency_options options;
  buffer_set sets[k_sets];
  symmetric_buffer<std::uint64_t> dead;
  std::optional<pinned_words> host;
  ep_totals totals;
  std::unique_ptr<low_latency_steps> steps;
  std::unique_ptr<ep_steps> local_steps;  ///< by expert: sums before they are sent
  std::uint64_t issued = 0;
};

low_latency_exchange::state::state(symmetric_heap& given, const low_latency_options& wanted)
    : heap(given), options(wanted) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  const int count = ranks.size();
  agree_on(ranks, "ep::low_latency_exchange: options", [&] {
    check_options(options, ranks);
    require_one_node("ep::low_latency_exchange", ranks,
                     "ep::exchange crosses nodes; or make one for the ranks of each node");
  });
  check_alike("ep::low_latency_exchange", ranks, options,
              [](const alike&, const auto&, const auto&) {});
  dead = {heap, 1, nullptr, {.tiers = tier_policy::device_only}};
  for (buffer_set& set : sets) take_buffers(set, count);
  agree_on(ranks, "ep::low_latency_exchange: begin", [&] {
    host.emplace(on(), k_host_words * sizeof(std::uint64_t));
    const auto word = [&](std::size_t index) {
      return host->at<std::uint64_t>(index * sizeof(std::uint64_t));
    };
    totals = {.lost_on_host = word(k_lost), .wrong_on_host = word(k_wrong)};
    const native_stream stream = on().create_stream(region.device());
    const auto clear = [&](const auto& words) {
      on().fill(reinterpret_cast<address>(words.local()), std::byte{0}, words.bytes(), stream);
    };
    clear(dead);
    // This rank's rows begin at the same place at every peer.
    const std::vector<std::int32_t> first(
        static_cast<std::size_t>(count),
        ranks.rank().value * static_cast<std::int32_t>(options.max_tokens));
    for (buffer_set& set : sets) {
      set.layout.most_rows_on_host = word(k_most_rows);
      clear(set.flags);
      on().copy(reinterpret_cast<address>(set.plan_first.local()),
                reinterpret_cast<address>(first.data()), set.plan_first.bytes(), stream);
    }
    on().synchronize(stream);
    on().destroy_stream(stream);
    const bool cuda = on().info().kind == driver_kind::cuda;
    steps = cuda ? make_cuda_low_latency_steps(region.device(), options.sms)
                 : make_host_low_latency_steps(on());
    local_steps = cuda ? make_cuda_steps(region.device(), options.sms, 0, options.experts)
                       : make_host_steps(on());
  });
}

void low_latency_exchange::state::take_buffers(buffer_set& set, int ranks) {
  const symmetric_request on_device{.tiers = tier_policy::device_only, .alignment = 4096};
  const auto all_ranks = static_cast<std::size_t>(ranks);
  const auto top_k = static_cast<std::size_t>(options.top_k);
  const std::size_t places = all_ranks * options.max_tokens;
  ep_shape& shape = set.shape;
  shape = common_shape(options, heap.region().view(), ranks);
  const auto scale_count = static_cast<std::size_t>(shape.scale_count);
  set.flags = {heap, flag_kinds * all_ranks, nullptr, on_device};
  set.masks = {heap, options.max_tokens, nullptr, on_device};
  set.x = {heap, places * shape.row_bytes, nullptr, on_device};
  if (scale_count > 0) set.scales = {heap, places * scale_count, nullptr, on_device};
  set.experts = {heap, places * top_k, nullptr, on_device};
  set.weights = {heap, places * top_k, nullptr, on_device};
  set.tokens = {heap, places, nullptr, on_device};
  set.plan_places = {heap, options.max_tokens * all_ranks, nullptr, on_device};
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
              .max_tokens = static_cast<int>(options.max_tokens),
              .plan = {.masks = set.masks.local(),
                       .places = set.plan_places.local(),
                       .first = set.plan_first.local()},
              .dead = dead.local()};
  set.layout.rows = {.filled = set.source_rows.local(),
                     .blocks = ranks,
                     .stride = static_cast<int>(options.max_tokens)};
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

buffer_set& low_latency_exchange::state::set_of(const round& of, stage wanted, const char* call) {
  buffer_set& set = sets[index_of(of)];
  if (set.number != of.number_ || of.number_ == 0) {
    refuse(fmt::format("{} of dispatch {}, whose buffers dispatch {} has by now", call, of.number_,
                       set.number),
           "two dispatches may be under way at once");
  }
  if (set.at != wanted) {
    refuse(fmt::format("{} of dispatch {}, which is {}", call, of.number_,
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

low_latency_exchange::round low_latency_exchange::state::issue(const tokens& from, bool wait,
                                                               native_stream stream) {
  const token_arrays arrays = arrays_of(from);
  round made;
  made.number_ = issued + 1;
  made.count_ = from.count;
  buffer_set& set = sets[index_of(made)];
  if (set.at == stage::sent || set.at == stage::returned) {
    refuse(fmt::format("dispatch {} would take the buffers of dispatch {}, whose {} is missing",
                       made.number_, set.number, waits_for(set.at)),
           "two dispatches may be under way at once");
  }
  set.number = ++issued;
  set.at = wait ? stage::received : stage::sent;
  steps->issue_dispatch(index_of(made), set.shape, set.slot, arrays, totals, wait, stream);
  return made;
}

low_latency_received low_latency_exchange::state::wait(const round& of, buffer_set& set,
                                                       native_stream stream) {
  steps->wait_dispatch(index_of(of), set.shape, set.slot, by_expert() ? &set.layout : nullptr,
                       totals, stream);
  set.at = stage::received;
  return output(set);
}

low_latency_received low_latency_exchange::state::output(const buffer_set& set) const {
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
    refuse(fmt::format("combine into {} with bias {}", out, bias), "give rows aligned to 16 bytes");
  }
}

low_latency_exchange::low_latency_exchange(symmetric_heap& heap, const low_latency_options& options)
    : state_(std::make_unique<state>(heap, options)) {}
low_latency_exchange::~low_latency_exchange() = default;

low_latency_exchange::round low_latency_exchange::issue_dispatch(const tokens& from,
                                                                 native_stream stream) {
  return state_->issue(from, false, stream);
}

low_latency_received low_latency_exchange::wait_dispatch(const round& of, native_stream stream) {
  state& s = *state_;
  buffer_set& set = s.set_of(of, stage::sent, "wait_dispatch()");
  return s.wait(of, set, stream);
}

void* low_latency_exchange::combine_buffer(const round& of) const {
  const buffer_set& set = state_->sets[state_->index_of(of)];
  return state_->by_expert() ? set.expert_y.local() : set.y.local();
}

void low_latency_exchange::issue_combine(const round& of, native_stream stream) {
  state& s = *state_;
  buffer_set& set = s.set_of(of, stage::received, "issue_combine()");
  if (s.by_expert()) s.local_steps->unpermute(set.shape, set.layout, true, stream);
  s.steps->issue_combine(set.shape, set.slot, stream);
  set.at = stage::returned;
}

void low_latency_exchange::wait_combine(const round& of, void* out, const void* bias,
                                        native_stream stream) {
  state& s = *state_;
  buffer_set& set = s.set_of(of, stage::returned, "wait_combine()");
  s.check_output(of, out, bias);
  s.steps->wait_combine(s.index_of(of), set.shape, set.slot, static_cast<int>(of.count_),
                        {.sums = out, .bias = bias}, s.totals, false, stream);
  set.at = stage::over;
}

low_latency_received low_latency_exchange::dispatch(const tokens& from, round& of,
                                                    native_stream stream) {
  state& s = *state_;
  // By expert the kernel that arranges the rows waits for them itself.
  of = s.issue(from, !s.by_expert(), stream);
  buffer_set& set = s.sets[s.index_of(of)];
  return s.by_expert() ? s.wait(of, set, stream) : s.output(set);
}

void low_latency_exchange::combine(const round& of, void* out, const void* bias,
                                   native_stream stream) {
  state& s = *state_;
  buffer_set& set = s.set_of(of, stage::received, "combine()");
  s.check_output(of, out, bias);
  if (s.by_expert()) s.local_steps->unpermute(set.shape, set.layout, true, stream);
  s.steps->wait_combine(s.index_of(of), set.shape, set.slot, static_cast<int>(of.count_),
                        {.sums = out, .bias = bias}, s.totals, true, stream);
  set.at = stage::over;
}

std::uint64_t low_latency_exchange::dead_ranks() const {
  return read_signal(state_->totals.lost_on_host);
}

void low_latency_exchange::check() {
  check_choices(state_->totals, state_->options.experts);
}

const low_latency_options& low_latency_exchange::options() const noexcept {
  return state_->options;
}

}  // namespace evmm::ep
