// SPDX-License-Identifier: Apache-2.0
#include "comm/thread_link.hpp"

#include <algorithm>
#include <utility>

namespace evmm {

void post_office::post(rank_id to, letter message) {
  box& into = boxes_[static_cast<std::size_t>(to.value)];
  const std::lock_guard lock(into.mutex);
  into.letters.push_back(std::move(message));
}

std::optional<post_office::letter> post_office::collect(rank_id rank) {
  box& from = boxes_[static_cast<std::size_t>(rank.value)];
  const std::lock_guard lock(from.mutex);
  if (from.letters.empty()) return std::nullopt;
  letter taken = std::move(from.letters.front());
  from.letters.pop_front();
  return taken;
}

node_link::transfer thread_link::send(rank_id to, std::span<const std::byte> message) {
  office_->post(to, {rank_, {message.begin(), message.end()}});
  return {};
}

std::optional<node_link::arrival> thread_link::probe() {
  if (!probed_) probed_ = office_->collect(rank_);
  if (!probed_) return std::nullopt;
  return arrival{probed_->from, probed_->bytes.size()};
}

node_link::transfer thread_link::receive(std::span<std::byte> into) {
  std::copy(probed_->bytes.begin(), probed_->bytes.end(), into.begin());
  probed_.reset();
  return {};
}

}  // namespace evmm
