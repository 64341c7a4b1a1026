// SPDX-License-Identifier: Apache-2.0
#include "comm/put_plan.hpp"

namespace evmm {

std::vector<put_step> put_plan::next(std::span<const node_exchange::block> out,
                                     std::span<const node_exchange::block> in) {
  using what = put_step::what;
  std::vector<put_step> steps;
  steps.reserve(out.size() + 2 * in.size());
  for (const auto& block : in) steps.push_back({.kind = what::announce, .peer = block.peer.value});
  for (const auto& block : out) {
    const int peer = block.peer.value;
    steps.push_back({.kind = what::put,
                     .peer = peer,
                     .value = ++to_.at(static_cast<std::size_t>(peer)),
                     .from = block.at,
                     .to = block.to,
                     .bytes = block.bytes});
  }
  for (const auto& block : in) {
    const int peer = block.peer.value;
    steps.push_back(
        {.kind = what::await, .peer = peer, .value = ++from_.at(static_cast<std::size_t>(peer))});
  }
  return steps;
}

}  // namespace evmm
