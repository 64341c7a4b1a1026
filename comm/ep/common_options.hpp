// SPDX-License-Identifier: Apache-2.0
#pragma once

#include "comm/ep/ep_shape.hpp"
#include "comm/ep/rail_steps.hpp"

#include <evmm/comm/bootstrap.hpp>
#include <evmm/ep/exchange.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <chrono>
#include <cstdint>
#include <string>

// What both kinds of exchange ask of their options and calls.

namespace evmm::ep {

inline bool aligned_rows(const void* at) {
  return reinterpret_cast<std::uintptr_t>(at) % 16 == 0;
}

/// Throws unsupported, naming what helps, when the ranks are on several nodes and there is no
/// channel between them; invalid_argument for one that goes to another region.
void check_channel(const char* who, const symmetric_heap& heap, const symmetric_channel* channel,
                   const char* help);

/// What the tokens of a call must be like.
struct token_rules {
  std::size_t max_tokens = 0;
  bool scales = false;  ///< whether the user gives them
};
/// Throws invalid_argument.
token_arrays check_tokens(const tokens& from, const token_rules& rules);
/// Throws invalid_argument when a token chose an expert that there is not, once.
void check_choices(const ep_totals& totals, int experts);

/// The job of these ranks, with a heap of theirs.
inline job_shape job_of(const symmetric_heap& heap) {
  const bootstrap& ranks = heap.region().ranks();
  return {.ranks = ranks.size(),
          .nodes = ranks.node_count(),
          .granularity = heap.region().granularity()};
}
/// Throws invalid_argument.
void check_job(const job_shape& job);
/// What there is of a view before there is a heap.
inline symmetric_view view_of(const job_shape& job) {
  symmetric_view view;
  view.ranks = job.ranks / job.nodes;
  return view;
}

constexpr int k_most_experts = 16384;  ///< of the job: their counts lie in a block's shared memory
constexpr std::chrono::hours k_longest_timeout{7 * 24};

/// Throws invalid_argument for options that cannot be.
template <class Options>
void check_common_options(const char* who, const Options& given, const job_shape& job) {
  const int ranks = job.ranks;
  const int on_node = (ranks + job.nodes - 1) / job.nodes;
  const auto refuse = [&](const std::string& what, const std::string& help) {
    throw invalid_argument(std::string(who) + ": " + what, help);
  };
  if (on_node > ep_shape::most_ranks) {
    refuse(fmt::format("{} ranks on a node", on_node),
           fmt::format("at most {} can exchange", ep_shape::most_ranks));
  }
  if (job.nodes > batch_counts::most_nodes) {
    throw unsupported(fmt::format("{}: {} nodes", who, job.nodes),
                      fmt::format("at most {} can exchange", +batch_counts::most_nodes));
  }
  if (given.experts < 1 || given.experts % ranks != 0) {
    refuse(fmt::format("experts is {}, with {} ranks", given.experts, ranks),
           "give a multiple of the number of ranks");
  }
  if (given.experts > k_most_experts) {
    refuse(fmt::format("experts is {}", given.experts),
           fmt::format("give at most {}", k_most_experts));
  }
  if (given.top_k < 1 || given.top_k > 32) {
    refuse(fmt::format("top_k is {}", given.top_k), "give 1 to 32");
  }
  if (given.hidden == 0 || given.hidden % 128 != 0 || given.hidden > 32768) {
    refuse(fmt::format("hidden is {}", given.hidden), "give a multiple of 128, at most 32,768");
  }
  if (given.quantize && given.rows != payload::fp8) {
    refuse("quantize is set for rows of bf16", "rows = payload::fp8 are quantised");
  }
  if (given.sms < 1) refuse(fmt::format("sms is {}", given.sms), "give 1 or more");
  if (given.timeout.count() <= 0 || given.timeout > k_longest_timeout) {
    refuse(fmt::format("the timeout is {} ms", given.timeout.count()),
           fmt::format("give 1 to {} ms", std::chrono::milliseconds(k_longest_timeout).count()));
  }
}

/// Compares options that every rank must give alike with those of rank 0.
class alike {
 public:
  alike(const char* who, std::size_t rank) : who_(who), rank_(rank) {}
  template <class T>
  void operator()(const char* option, const T& of_first, const T& of_other) const {
    if (of_first == of_other) return;
    throw invalid_argument(fmt::format("{}: {} is {} on rank 0 and {} on rank {}", who_, option,
                                       of_first, of_other, rank_),
                           "give every rank the same");
  }

 private:
  const char* who_;
  std::size_t rank_;
};

/// Collective: compares what all options share, then calls `more(same, first, other)` for the rest.
template <class Options, class More>
void check_alike(const char* who, bootstrap& ranks, const Options& mine, const More& more) {
  const auto all = ranks.all_gather_value(mine, "ep: options of all");
  for (std::size_t r = 1; r < all.size(); ++r) {
    const alike same(who, r);
    const Options &a = all[0], &b = all[r];
    same("experts", a.experts, b.experts);
    same("top_k", a.top_k, b.top_k);
    same("hidden", a.hidden, b.hidden);
    same("rows", static_cast<int>(a.rows), static_cast<int>(b.rows));
    same("quantize", a.quantize, b.quantize);
    same("arranged", static_cast<int>(a.arranged), static_cast<int>(b.arranged));
    same("max_tokens", a.max_tokens, b.max_tokens);
    same("sms", a.sms, b.sms);
    more(same, a, b);
  }
}

/// All of a shape but its buffers, of an exchange among `job_ranks` in all.
template <class Options>
ep_shape common_shape(const Options& options, const symmetric_view& view, int job_ranks) {
  const bool fp8 = options.rows == payload::fp8;
  ep_shape shape;
  shape.base = view.base;
  shape.stride = view.stride;
  shape.rank = view.rank;
  shape.ranks = view.ranks;
  shape.local_experts = options.experts / job_ranks;
  shape.top_k = options.top_k;
  shape.hidden = static_cast<int>(options.hidden);
  shape.row_bytes = static_cast<std::uint32_t>(options.hidden * (fp8 ? 1 : 2));
  shape.scale_count = fp8 ? static_cast<int>(options.hidden / 128) : 0;
  shape.quantize = options.quantize;
  shape.blocks = options.sms;
  shape.timeout_ns = static_cast<std::uint64_t>(std::chrono::nanoseconds(options.timeout).count());
  return shape;
}

}  // namespace evmm::ep
