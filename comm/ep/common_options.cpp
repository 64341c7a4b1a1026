// SPDX-License-Identifier: Apache-2.0
#include "comm/ep/common_options.hpp"

namespace evmm::ep {

void check_channel(const char* who, const symmetric_heap& heap, const symmetric_channel* channel,
                   const char* help) {
  const int nodes = heap.region().ranks().node_count();
  if (channel == nullptr && nodes > 1) {
    throw unsupported(fmt::format("{}: the ranks are on {} nodes", who, nodes), help);
  }
  if (channel != nullptr && &channel->region() != &heap.region()) {
    throw invalid_argument(fmt::format("{}: the channel is not on the region of the heap", who),
                           "make the channel on symmetric_heap::region()");
  }
}

void check_job(const job_shape& job) {
  if (job.ranks >= 1 && job.nodes >= 1 && job.ranks % job.nodes == 0 && job.granularity > 0) return;
  throw invalid_argument(fmt::format("a job of {} ranks on {} nodes, with segments in units of {}",
                                     job.ranks, job.nodes, job.granularity),
                         "give ranks and nodes, as many ranks on each, and "
                         "symmetric_region::granularity()");
}

token_arrays check_tokens(const tokens& from, const token_rules& rules) {
  const auto refuse = [](const std::string& what, const std::string& help) {
    throw invalid_argument("cannot send " + what, help);
  };
  if (from.count > rules.max_tokens) {
    refuse(fmt::format("{} tokens: the exchange was made for {}", from.count, rules.max_tokens),
           "raise max_tokens on all ranks, or send them in parts");
  }
  if (from.most != 0 && (from.most < from.count || from.most > rules.max_tokens)) {
    refuse(fmt::format("{} tokens where ranks give {} at most: the exchange was made for {}",
                       from.count, from.most, rules.max_tokens),
           "let `most` be what the rank with most tokens gives, or 0");
  }
  if (from.count > 0) {
    if (from.x == nullptr || !aligned_rows(from.x)) {
      refuse(fmt::format("rows at {}", from.x), "give rows aligned to 16 bytes");
    }
    if (from.topk_ids == nullptr) {
      refuse("tokens whose topk_ids is null", "give [tokens][top_k] expert ids");
    }
    if (rules.scales && from.scales == nullptr) {
      refuse("fp8 rows whose scales are null",
             "give one float for each 128 elements, or rows of bf16 with quantize set");
    }
    if (!rules.scales && from.scales != nullptr) {
      refuse("scales with rows of bf16", "leave them null");
    }
  }
  return {.x = static_cast<const char*>(from.x),
          .scales = from.scales,
          .ids = from.topk_ids,
          .weights = from.topk_weights,
          .count = static_cast<int>(from.count)};
}

void check_choices(const ep_totals& totals, int experts) {
  const std::uint64_t wrong = __atomic_exchange_n(totals.wrong_on_host, 0, __ATOMIC_ACQ_REL);
  if (wrong == 0) return;
  throw invalid_argument(fmt::format("a token chose expert {}: there are {}", wrong - 1, experts),
                         "ids run from 0; -1 chooses nobody. The choice was left out");
}

}  // namespace evmm::ep
