// SPDX-License-Identifier: Apache-2.0
#include "comm/collective_change.hpp"
#include "comm/ep/ep_steps.hpp"
#include "lib/support/format.hpp"
#include "lib/support/log.hpp"

#include <evmm/comm/symmetric_buffer.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <algorithm>
#include <thread>
#include <utility>

namespace evmm::ep {

namespace {

/// Options that every rank must give alike.
struct shared_exchange_options {
  int experts, top_k, sms;
  std::size_t hidden, max_tokens, device_rows;
  payload rows;
  friend bool operator==(const shared_exchange_options&, const shared_exchange_options&) = default;
};

void check_options(const exchange_options& given, int ranks) {
  const auto refuse = [](const std::string& what, const std::string& help) {
    throw invalid_argument("ep::exchange: " + what, help);
  };
  if (ranks > ep_shape::most_ranks) {
    refuse(fmt::format("{} ranks", ranks),
           fmt::format("at most {} can exchange", ep_shape::most_ranks));
  }
  if (given.experts < 1 || given.experts % ranks != 0) {
    refuse(fmt::format("experts is {}, with {} ranks", given.experts, ranks),
           "give a multiple of the number of ranks");
  }
  if (given.top_k < 1 || given.top_k > 32) {
    refuse(fmt::format("top_k is {}", given.top_k), "give 1 to 32");
  }
  if (given.hidden == 0 || given.hidden % 128 != 0 || given.hidden > 32768) {
    refuse(fmt::format("hidden is {}", given.hidden), "give a multiple of 128, at most 32,768");
  }
  if (given.max_tokens == 0 || given.max_tokens > (std::size_t{1} << 20)) {
    refuse(fmt::format("max_tokens is {}", given.max_tokens), "give 1 to 1,048,576");
  }
  if (given.sms < 1) refuse(fmt::format("sms is {}", given.sms), "give 1 or more");
  if (given.timeout.count() <= 0)
    refuse("the timeout is not positive", "give milliseconds above 0");
}

bool aligned(const void* at) {
  return reinterpret_cast<std::uintptr_t>(at) % 16 == 0;
}

/// Page-locked words that kernels write and the CPU reads.
class pinned_words {
 public:
  pinned_words(driver& on, std::size_t bytes) : on_(on), at_(on.allocate_pinned(bytes)) {
    std::fill_n(reinterpret_cast<char*>(at_), bytes, 0);
  }
  pinned_words(const pinned_words&) = delete;
  pinned_words& operator=(const pinned_words&) = delete;
  ~pinned_words() {
    log_failure("freeing an exchange's page-locked words", [&] { on_.free_pinned(at_); });
  }
  template <class T>
  T* at(std::size_t offset) const {
    return reinterpret_cast<T*>(at_ + offset);
  }

 private:
  driver& on_;
  address at_;
};

constexpr std::size_t k_host_words = 16;  ///< where the counts begin, behind round and lost

}  // namespace

struct plan::state {
  symmetric_buffer<std::uint64_t> masks;
  symmetric_buffer<std::int32_t> places, first;
  std::size_t count = 0;
  plan_arrays arrays() const { return {masks.local(), places.local(), first.local()}; }
};

plan::plan(std::unique_ptr<state> made) : state_(std::move(made)) {}
plan::plan(plan&&) noexcept = default;
plan& plan::operator=(plan&&) noexcept = default;
plan::~plan() = default;
std::size_t plan::tokens() const noexcept {
  return state_->count;
}

struct exchange::state {
  state(symmetric_heap& given, const exchange_options& wanted);

  token_arrays arrays_of(const tokens& from) const;
  received output() const;
  /// Memory for `rows` rows: those beyond device_rows in host memory.
  symmetric_buffer<std::byte> rows_of(std::size_t bytes_each);
  driver& on() const { return heap.region().on(); }

  symmetric_heap& heap;
  exchange_options options;
  std::size_t capacity = 0;
  std::vector<pool_id> pools;
  symmetric_buffer<std::uint64_t> flags;
  symmetric_buffer<std::int32_t> messages, totals_words;
  symmetric_buffer<std::byte> x, scales, experts, weights, tokens_of, y;
  std::optional<pinned_words> host;
  ep_shape shape;
  ep_totals totals;
  std::unique_ptr<ep_steps> steps;
  std::uint64_t counted = 0, sent = 0, combined = 0;  ///< rounds begun
  std::uint64_t planned = 0;                          ///< the last of `counted` with counts
};

exchange::state::state(symmetric_heap& given, const exchange_options& wanted)
    : heap(given), options(wanted) {
  symmetric_region& region = heap.region();
  bootstrap& ranks = region.ranks();
  const int count = ranks.size();
  agree_on(ranks, "ep::exchange: options", [&] {
    check_options(options, count);
    if (ranks.node_count() > 1) {
      throw unsupported(fmt::format("ep::exchange: the ranks are on {} nodes", ranks.node_count()),
                        "make one exchange for the ranks of each node");
    }
  });
  const shared_exchange_options mine{options.experts, options.top_k,      options.sms,
                                     options.hidden,  options.max_tokens, options.device_rows,
                                     options.rows};
  const auto all = ranks.all_gather_value(mine, "ep::exchange: options of all");
  for (std::size_t r = 1; r < all.size(); ++r) {
    if (all[r] == all[0]) continue;
    throw invalid_argument(
        fmt::format("ep::exchange: rank 0 and rank {} gave different options (experts {} and {}, "
                    "top_k {} and {}, sms {} and {}, hidden {} and {}, max_tokens {} and {}, "
                    "device_rows {} and {})",
                    r, all[0].experts, all[r].experts, all[0].top_k, all[r].top_k, all[0].sms,
                    all[r].sms, all[0].hidden, all[r].hidden, all[0].max_tokens, all[r].max_tokens,
                    all[0].device_rows, all[r].device_rows),
        "give every rank the same");
  }
  capacity = static_cast<std::size_t>(count) * options.max_tokens;
  if (options.device_rows == 0 || options.device_rows > capacity) options.device_rows = capacity;
  const int local_experts = options.experts / count;
  const auto top_k = static_cast<std::size_t>(options.top_k);

  const symmetric_request on_device{.tiers = tier_policy::device_only};
  flags = {heap, static_cast<std::size_t>(flag_kinds * count), nullptr, on_device};
  messages = {heap, static_cast<std::size_t>(count * (count + local_experts)), nullptr, on_device};
  totals_words = {heap, static_cast<std::size_t>(1 + count + local_experts), nullptr, on_device};
  shape.row_bytes = static_cast<std::uint32_t>(
      options.hidden * (options.rows == payload::bf16 ? sizeof(std::uint16_t) : 1));
  shape.scale_count = static_cast<int>(options.rows == payload::fp8 ? options.hidden / 128 : 0);
  x = rows_of(shape.row_bytes);
  if (shape.scale_count > 0) {
    scales = rows_of(static_cast<std::size_t>(shape.scale_count) * sizeof(float));
  }
  experts = rows_of(top_k * sizeof(std::int32_t));
  weights = rows_of(top_k * sizeof(float));
  tokens_of = rows_of(sizeof(std::int32_t));
  y = rows_of(options.hidden * sizeof(std::uint16_t));

  const symmetric_view view = region.view();
  shape.base = view.base;
  shape.stride = view.stride;
  shape.rank = view.rank;
  shape.ranks = view.ranks;
  shape.local_experts = local_experts;
  shape.top_k = options.top_k;
  shape.hidden = static_cast<int>(options.hidden);
  shape.blocks = options.sms;
  shape.timeout_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(options.timeout).count());
  shape.flags = flags.offset();
  shape.counts = messages.offset();
  shape.x = x.offset();
  shape.scales = scales ? scales.offset() : 0;
  shape.experts = experts.offset();
  shape.weights = weights.offset();
  shape.tokens = tokens_of.offset();
  shape.y = y.offset();

  agree_on(ranks, "ep::exchange: begin", [&] {
    host.emplace(on(), (k_host_words + totals_words.size()) * sizeof(std::int32_t));
    totals = {.words = totals_words.local(),
              .on_host = host->at<std::int32_t>(k_host_words * sizeof(std::int32_t)),
              .round_on_host = host->at<std::uint64_t>(0),
              .lost_on_host = host->at<std::uint64_t>(sizeof(std::uint64_t)),
              .wrong_on_host = host->at<std::uint64_t>(2 * sizeof(std::uint64_t))};
    const native_stream stream = on().create_stream(region.device());
    on().fill(reinterpret_cast<address>(flags.local()), std::byte{0}, flags.bytes(), stream);
    on().synchronize(stream);
    on().destroy_stream(stream);
    steps = on().info().kind == driver_kind::cuda
                ? make_cuda_steps(region.device(), options.sms, options.experts)
                : make_host_steps(on());
  });
}

symmetric_buffer<std::byte> exchange::state::rows_of(std::size_t bytes_each) {
  const std::size_t granule = heap.region().granularity();
  const std::size_t bytes = capacity * bytes_each;
  const std::size_t device = std::min(bytes, options.device_rows * bytes_each);
  if (device == bytes) {
    return {heap, bytes, nullptr, {.tiers = tier_policy::device_only, .alignment = 4096}};
  }
  // Segments of its own, so that the border between the tiers lies where it was asked for.
  const pool_id pool = heap.create_pool();
  pools.push_back(pool);
  const std::size_t on_device = (device + granule - 1) / granule * granule;
  if (on_device > 0) heap.grow(tier::device, on_device, pool);
  if (bytes > on_device) heap.grow(tier::host, bytes - on_device, pool);
  return {heap, bytes, nullptr, {.may_span = true, .alignment = 4096, .pool = pool}};
}

token_arrays exchange::state::arrays_of(const tokens& from) const {
  const auto refuse = [](const std::string& what, const std::string& help) {
    throw invalid_argument("cannot dispatch: " + what, help);
  };
  if (from.count > options.max_tokens) {
    refuse(
        fmt::format("{} tokens, and the exchange was made for {}", from.count, options.max_tokens),
        "raise max_tokens on all ranks, or send them in parts");
  }
  if (from.count > 0 && (from.x == nullptr || !aligned(from.x))) {
    refuse(fmt::format("x is at {}", from.x), "give rows aligned to 16 bytes");
  }
  if (options.rows == payload::fp8 && from.count > 0 && from.scales == nullptr) {
    refuse("scales are null", "fp8 rows need one float for each 128 elements");
  }
  return {.x = static_cast<const char*>(from.x),
          .scales = from.scales,
          .ids = from.topk_ids,
          .weights = from.topk_weights,
          .count = static_cast<int>(from.count)};
}

received exchange::state::output() const {
  const auto at = [](const symmetric_buffer<std::byte>& of) {
    return of ? static_cast<void*>(of.local()) : nullptr;
  };
  return {.x = at(x),
          .scales = static_cast<float*>(at(scales)),
          .experts = static_cast<std::int32_t*>(at(experts)),
          .weights = static_cast<float*>(at(weights)),
          .tokens = static_cast<std::int32_t*>(at(tokens_of)),
          .rows = totals.words,
          .source_end = totals.words + 1,
          .expert_tokens = totals.words + 1 + shape.ranks,
          .capacity = capacity};
}

exchange::exchange(symmetric_heap& heap, const exchange_options& options)
    : state_(std::make_unique<state>(heap, options)) {}
exchange::~exchange() = default;

plan exchange::make_plan() {
  state& s = *state_;
  const symmetric_request on_device{.tiers = tier_policy::device_only};
  const auto ranks = static_cast<std::size_t>(s.shape.ranks);
  auto made = std::make_unique<plan::state>();
  made->masks = {s.heap, s.options.max_tokens, nullptr, on_device};
  made->places = {s.heap, s.options.max_tokens * ranks, nullptr, on_device};
  made->first = {s.heap, ranks, nullptr, on_device};
  return plan(std::move(made));
}

received exchange::dispatch(const tokens& from, plan& to, native_stream stream) {
  state& s = *state_;
  const token_arrays arrays = s.arrays_of(from);
  if (from.count > 0 && from.topk_ids == nullptr) {
    throw invalid_argument("cannot dispatch: topk_ids is null", "give [tokens][top_k] expert ids");
  }
  to.state_->count = from.count;
  s.planned = ++s.counted;
  s.steps->plan(s.shape, arrays, to.state_->arrays(), s.totals, s.counted, stream);
  s.steps->send(s.shape, arrays, to.state_->arrays(), s.totals, {s.counted, ++s.sent}, true,
                stream);
  return s.output();
}

received exchange::dispatch_again(const tokens& from, const plan& by, native_stream stream) {
  state& s = *state_;
  token_arrays arrays = s.arrays_of(from);
  if (from.count != by.tokens()) {
    throw invalid_argument(
        fmt::format("cannot dispatch {} tokens by a plan of {}", from.count, by.tokens()),
        "give the tokens in the order of the dispatch that filled the plan");
  }
  arrays.ids = nullptr;
  s.steps->send(s.shape, arrays, by.state_->arrays(), s.totals, {++s.counted, ++s.sent}, false,
                stream);
  return s.output();
}

void* exchange::combine_buffer() const {
  return state_->y.local();
}

void exchange::combine(const plan& by, void* out, const void* bias, native_stream stream) {
  state& s = *state_;
  if (by.tokens() > 0 && (out == nullptr || !aligned(out) || !aligned(bias))) {
    throw invalid_argument(fmt::format("cannot combine into {} with bias {}", out, bias),
                           "give rows aligned to 16 bytes");
  }
  s.steps->combine(s.shape, static_cast<int>(by.tokens()), by.state_->arrays(), out, bias, s.totals,
                   ++s.combined, stream);
}

row_counts exchange::counts() {
  state& s = *state_;
  const auto end = std::chrono::steady_clock::now() + s.options.timeout + s.options.timeout;
  while (read_signal(s.totals.round_on_host) < s.planned) {
    if (std::chrono::steady_clock::now() > end) {
      check();
      throw timed_out(fmt::format("the counts of dispatch {} did not come within {} ms", s.planned,
                                  2 * s.options.timeout.count()),
                      "is the stream waiting for something else?");
    }
    std::this_thread::yield();
  }
  const std::int32_t* word = s.totals.on_host;
  row_counts all{.rows = static_cast<std::size_t>(*word++), .by_source = {}, .by_expert = {}};
  std::int32_t before = 0;
  for (int r = 0; r < s.shape.ranks; ++r, ++word) {
    all.by_source.push_back(static_cast<std::size_t>(*word - before));
    before = *word;
  }
  for (int e = 0; e < s.shape.local_experts; ++e, ++word) {
    all.by_expert.push_back(static_cast<std::size_t>(*word));
  }
  all.spilled = all.rows - std::min(all.rows, s.options.device_rows);
  return all;
}

void exchange::check() {
  if (const std::uint64_t wrong = read_signal(state_->totals.wrong_on_host); wrong != 0) {
    throw invalid_argument(
        fmt::format("a token chose expert {}: there are {}", wrong - 1, state_->options.experts),
        "ids run from 0; -1 chooses nobody. The choice was left out");
  }
  const std::uint64_t lost = read_signal(state_->totals.lost_on_host);
  if (lost == 0) return;
  std::string text;
  for (int r = 0; r < state_->shape.ranks; ++r) {
    if ((lost >> r & 1) != 0) text += fmt::format("{}{}", text.empty() ? "" : ", ", r);
  }
  throw peer_error(fmt::format("ranks {} did not come to an exchange within {} ms", text,
                               state_->options.timeout.count()),
                   "do all ranks make the same calls? raise exchange_options::timeout");
}

const exchange_options& exchange::options() const noexcept {
  return state_->options;
}
std::size_t exchange::capacity() const noexcept {
  return state_->capacity;
}

}  // namespace evmm::ep
