// SPDX-License-Identifier: Apache-2.0
#include "tests/support/ep_tensors.hpp"

#include <algorithm>

namespace evmm::test {

ep_tensors::ep_tensors(const rank_context& at, const ep::exchange_options& options,
                       std::size_t reserve, std::size_t growth_step)
    : at_(at),
      heap_(at.make({.reserve = reserve, .max_segments = 64}), {.growth_step = growth_step}),
      stream_(at.on->create_stream(at.device)) {
  const std::size_t choices = options.max_tokens * static_cast<std::size_t>(options.top_k);
  x_ = {heap_, options.max_tokens * options.hidden * 2};
  scales_ = {heap_, options.max_tokens * options.hidden / 128};
  ids_ = {heap_, choices};
  weights_ = {heap_, choices};
}

ep_tensors::~ep_tensors() {
  at_.on->synchronize(stream_);
  at_.on->destroy_stream(stream_);
}

ep::tokens ep_tensors::upload(const ep_script& script) {
  const bool with_scales = script.scaled() && !script.options.quantize;
  put(x_.local(), script.given(me()));
  if (with_scales) put(scales_.local(), script.scales(me()));
  put(ids_.local(), script.ids(me()));
  put(weights_.local(), script.weights(me()));
  return {.x = x_.local(),
          .scales = with_scales ? scales_.local() : nullptr,
          .topk_ids = ids_.local(),
          .topk_weights = weights_.local(),
          .count = script.counts[static_cast<std::size_t>(me())],
          .most = script.tells_most ? *std::max_element(script.counts.begin(), script.counts.end())
                                    : 0};
}

void ep_tensors::copy(address to, address from, std::size_t bytes) {
  settle();
  at_.on->copy(to, from, bytes, stream_);
  at_.on->synchronize(stream_);
}

}  // namespace evmm::test
