// SPDX-License-Identifier: Apache-2.0
#include <evmm/comm/node_link.hpp>
#include <evmm/error.hpp>

#include <fmt/format.h>

#include <utility>

namespace evmm {

std::unique_ptr<node_exchange> node_link::make_exchange(symmetric_region&) {
  return nullptr;
}

std::unique_ptr<large_transfers> node_link::make_large_transfers(device_id) {
  return nullptr;
}

link_hold::link_hold(std::shared_ptr<node_link> of) : link_(std::move(of)) {
  if (!link_->held_.exchange(true)) return;
  throw invalid_argument(
      fmt::format("the link {} is in use by a channel or another link, or was by a channel that "
                  "sent and was not closed",
                  link_->name()),
      "make one for each channel: bootstrap::make_link, make_nccl_link");
}

link_hold::~link_hold() {
  if (!left_behind_) link_->held_ = false;
}

}  // namespace evmm
